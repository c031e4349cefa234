"""Memory of a worker and bytes per step for a model of 7 B parameters: computed from formulas, not measured.

``python -m benchmarks.seven`` prints the table of docs/finetune.md.
"""

from __future__ import annotations

# Llama 2 7B: hidden size, size of the middle layer, layers, words.
HIDDEN, MIDDLE, LAYERS, WORDS = 4096, 11008, 32, 32000
WORKERS = 4
RANK = 16
# Bytes of a number: of the model and its gradients (bfloat16), of the master weights and of both moments (float32).
MODEL, MASTER, MOMENTS = 2, 4, 8
GIB = 2**30


def parameters() -> int:
    """All parameters: attention, middle layers and two norms in each layer; embedding, head and last norm."""
    layer = 4 * HIDDEN**2 + 3 * HIDDEN * MIDDLE + 2 * HIDDEN
    return LAYERS * layer + 2 * WORDS * HIDDEN + HIDDEN


def adapters() -> int:
    """Parameters of LoRA on the queries and values of each layer: two matrices of HIDDEN × RANK each."""
    return LAYERS * 2 * 2 * HIDDEN * RANK


def needs() -> dict[str, tuple[float, float, float]]:
    """By method: bytes in a worker's memory, on all servers together, and sent and received by a worker in a step.

    P parameters, A of adapters, n workers. Activations are left out, since they are the same in all methods. A ring
    of n processes sends 2 (n - 1) / n of the bytes for a sum, and half of that to gather or to scatter.
    """
    p, a, n = parameters(), adapters(), WORKERS
    state, half = MASTER + MOMENTS, (n - 1) / n
    return {
        # Weights and gradients of the model, and as float32 the weights that come and the sum that leaves.
        "paramserver, whole": (p * (MODEL + MODEL + 2 * MASTER), p * state, 2 * MASTER * p),
        "paramserver, LoRA": (MODEL * p + a * (2 * MASTER + 2 * MASTER), a * state, 2 * MASTER * a),
        "DDP": (p * (2 * MODEL + state), 0.0, 2 * 2 * half * MODEL * p),
        "DDP, LoRA": (MODEL * p + a * (2 * MASTER + MOMENTS), 0.0, 2 * 2 * half * MASTER * a),
        "ZeRO 1": (p * (2 * MODEL + state / n), 0.0, 2 * 2 * half * MODEL * p),
        "ZeRO 2": (p * (MODEL + (MODEL + state) / n), 0.0, 2 * 2 * half * MODEL * p),
        "FSDP, ZeRO 3": (p * (2 * MODEL + state) / n, 0.0, 2 * 3 * half * MODEL * p),
    }


def table() -> str:
    """The table of docs/finetune.md, in GiB."""
    lines = [
        "| method | memory of a worker | of all servers | sent and received by a worker in a step |",
        "|---|---|---|---|",
    ]
    for method, numbers in needs().items():
        lines.append("| " + " | ".join((method, *(f"{value / GIB:.2f}" for value in numbers))) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
