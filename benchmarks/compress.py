"""Compressed gradients: costs and savings of encoding, and the final loss.

1. Recorded gradients of a real model: encode and decode, each beside a memcpy of as many bytes, and the bandwidth below
   which encoding saves time. The ratio is a variant's time over that of memcpy.
2. The digits under `paramserver run`, to the end, with each compression.
3. The same between emulated hosts at 200 Mb/s (root, iproute2): bytes on the wire and seconds per step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import hosts
from benchmarks.digits import digits, network, optimizer_of
from benchmarks.launch import SCRIPTS, flags, under_run
from benchmarks.rows import Row, rows
from paramserver.compress.base import Compressor
from paramserver.compress.options import Wire
from paramserver.compress.registry import push_compressor
from paramserver.core.layout.plan import TensorSpec, default_chunk_bytes, make_layout
from paramserver.tensors.dtypes import buffer_of
from paramserver.worker.flat import FlatSpace

SCRIPT = SCRIPTS / "compress.py"
# Between hosts also a model that is large enough for weights to be sent while gradients still come in.
HIDDEN, LARGE = 1024, 1536
BATCH, WORKERS, SERVERS = 16, 2, 1
MEGABITS = 200.0
EPOCHS, HOSTS_EPOCHS, SKIP = 4, 1, 2
PLAIN, INT8 = "fp32", "int8"
PUSHES = ("bf16", "fp16", "int8", "topk")
RATIO = Wire().topk_ratio
# The compressor of pushes, and the precision of pulls.
RUNS: Mapping[str, tuple[str, str]] = {
    PLAIN: ("none", "fp32"),
    **{push: (push, "fp32") for push in PUSHES},
    "pull bf16": ("none", "bf16"),
    "int8, pull bf16": ("int8", "bf16"),
}
ON_HOSTS = (PLAIN, INT8, "int8, pull bf16")
# Steps whose gradients are recorded.
_RECORDED = 4


def run(repetitions: int) -> list[Row]:
    """All three parts. Raises RuntimeError if a run fails."""
    found = codecs(repetitions) + losses()
    try:
        return found + between_hosts(HIDDEN, repetitions) + between_hosts(LARGE, repetitions)
    except RuntimeError as error:
        if "root" not in str(error):
            raise
        print(f"no emulated hosts: {error}", file=sys.stderr)
        return found


# ---- encoding


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one compressor, for all recorded gradients: seconds by repetition, bytes before and after, relative error."""

    encode_s: list[float]
    decode_s: list[float]
    before: int
    after: int
    error: float

    @property
    def break_even(self) -> float:
        """Bytes per second of a link below which a message arrives sooner compressed."""
        return (self.before - self.after) / (median(self.encode_s) + median(self.decode_s))


def recorded() -> list[torch.Tensor]:
    """Gradients of the first steps, in chunks as they are sent."""
    torch.set_num_threads(1)
    model, data = network(HIDDEN), digits()
    optimizer = optimizer_of(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    specs = [TensorSpec(name, tuple(p.shape), "float32") for name, p in model.named_parameters()]
    layout = make_layout(specs, default_chunk_bytes(4 * size))
    chunks = []
    for step in range(_RECORDED):
        x, y = (tensor[step * BATCH : (step + 1) * BATCH] for tensor in data.tensors)
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        space = FlatSpace(layout, torch.device("cpu"))
        for index, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            space.view(index).copy_(parameter.grad)
        chunks += [space.chunk(chunk.index) for chunk in layout.chunks]
        optimizer.step()
    return chunks


def codecs(repetitions: int) -> list[Row]:
    """Encode and decode beside memcpy, in turn."""
    chunks = recorded()
    target = torch.empty_like(max(chunks, key=torch.numel))
    compressors = {name: push_compressor(name) for name in PUSHES}
    copies: list[float] = []
    costs: dict[str, Cost] = {}
    for _ in range(max(5, repetitions)):
        copies.append(_timed(lambda: [target[: chunk.numel()].copy_(chunk) for chunk in chunks]))
        for compressor in compressors.values():
            assert compressor is not None
            measure(compressor, chunks, costs)
    megabytes = 4 * sum(chunk.numel() for chunk in chunks) / 1e6
    for name, cost in costs.items():
        said = [
            f"{what} {megabytes / 1e3 / median(seconds):.2f} GB/s ({median(seconds) / median(copies):.1f} memcpy)"
            for what, seconds in (("encode", cost.encode_s), ("decode", cost.decode_s))
        ]
        said.append(f"{cost.before / cost.after:.2f} times fewer bytes, error {cost.error:.2%}")
        print(f"{name}: {', '.join(said)}, pays below {cost.break_even * 8 / 1e9:.1f} Gb/s", file=sys.stderr)
    case = f"{megabytes:.0f} MB of gradients"
    found = []
    for what in ("encode", "decode"):
        seconds = {"memcpy": copies, **{name: getattr(cost, f"{what}_s") for name, cost in costs.items()}}
        found += rows("compress", f"{what} {case}", seconds, "memcpy")
    return found


def measure(compressor: Compressor, chunks: Sequence[torch.Tensor], costs: dict[str, Cost]) -> None:
    """Encode and decode once more. Checks that the decoded numbers are those that the encoder returned."""
    payloads: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    told = [torch.empty_like(chunk) for chunk in chunks]
    encode_s = _timed(
        lambda: payloads.extend(compressor.encode(chunk, out) for chunk, out in zip(chunks, told, strict=True))
    )
    decode_s = _timed(
        lambda: read.extend(
            compressor.decode(buffer_of(payload), chunk.numel())
            for payload, chunk in zip(payloads, chunks, strict=True)
        )
    )
    if not all(one.equal(other) for one, other in zip(read, told, strict=True)):
        raise RuntimeError(f"{compressor.name}: the decoded numbers are not those that the encoder returned")
    everything, missing = torch.cat(list(chunks)), torch.cat(list(chunks)) - torch.cat(read)
    cost = costs.setdefault(
        compressor.name,
        Cost(
            [],
            [],
            sum(4 * chunk.numel() for chunk in chunks),
            sum(payload.numel() for payload in payloads),
            float(missing.norm() / everything.norm()),
        ),
    )
    cost.encode_s.append(encode_s)
    cost.decode_s.append(decode_s)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# ---- training


def words(epochs: int, hidden: int = HIDDEN) -> list[str]:
    """The arguments of the script."""
    return flags({"--hidden": hidden, "--batch": BATCH, "--epochs": epochs, "--skip": SKIP})


def settings(variant: str) -> dict[str, str]:
    """The settings of a run, by dotted name."""
    push, pull = RUNS[variant]
    return {"training.push_compression": push, "training.pull_precision": pull}


def losses() -> list[Row]:
    """One run of each, on this host over gRPC; the final losses are printed."""
    seconds: dict[str, list[float]] = {}
    final: dict[str, float] = {}
    for variant in RUNS:
        options = [word for key, value in settings(variant).items() for word in ("--set", f"{key}={value}")]
        found, summary = under_run(
            SCRIPT, words(EPOCHS), WORKERS, SERVERS, [*options, "--set", "cluster.transport=grpc"]
        )
        seconds[variant], final[variant] = found["step_s"], found["loss"]
        said = f"loss {final[variant]:.5f} ({final[variant] / final[PLAIN] - 1:+.2%}) after {found['steps']} steps"
        print(f"{variant}: {said}; weights {summary['weights_sha256'][:12]}", file=sys.stderr, flush=True)
    return rows("compress", f"digits, {WORKERS} + {SERVERS}, one host, gRPC", seconds, INT8)


def between_hosts(hidden: int, repetitions: int) -> list[Row]:
    """All runs in turn. Prints the bytes that the workers' hosts have sent."""
    seconds: dict[str, list[float]] = {variant: [] for variant in ON_HOSTS}
    sent: dict[str, int] = {}
    final: dict[str, float] = {}
    case = f"digits, {hidden} wide, {WORKERS} + {SERVERS}, {MEGABITS:g} Mb/s"
    with hosts.network(WORKERS, SERVERS, MEGABITS) as network:
        workers = [f"w{i}" for i in range(WORKERS)]
        for number in range(repetitions):
            for variant in ON_HOSTS[:: -1 if number % 2 else 1]:
                before = sum(hosts.sent_bytes(network, worker) for worker in workers)
                found = hosts.cluster(
                    network, WORKERS, SERVERS, words(HOSTS_EPOCHS, hidden), script=SCRIPT, settings=settings(variant)
                )
                sent[variant] = sum(hosts.sent_bytes(network, worker) for worker in workers) - before
                seconds[variant] += found["step_s"]
                final[variant] = found["loss"]
                print(
                    f"{case}, {variant}: {median(found['step_s']):.3f} s per step, "
                    f"{sent[variant] / found['steps'] / WORKERS / 1e6:.2f} MB sent per worker-step, "
                    f"loss {found['loss']:.5f}",
                    file=sys.stderr,
                    flush=True,
                )
    for variant in ON_HOSTS:
        print(
            f"{case}, {variant}: {sent[PLAIN] / sent[variant]:.2f} times fewer bytes pushed, "
            f"{median(seconds[PLAIN]) / median(seconds[variant]):.2f} times as many steps, "
            f"loss {final[variant] / final[PLAIN] - 1:+.2%}",
            file=sys.stderr,
        )
    return rows("compress", case, seconds, INT8)
