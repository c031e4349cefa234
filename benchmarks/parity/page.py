"""docs/parity.md: the measured differences and the refusals, as a page."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import paramserver
from benchmarks.parity.rows import Refusal, Row

PAGE = Path(__file__).resolve().parents[2] / "docs/parity.md"
_HEAD = """\
# Beside plain torch and DDP

`python -m benchmarks parity` writes this page. Each row is a script that trains a small network twice: as workers of a
job, and with the reference. One function is the script of both, with the same batches in each step. The functions are
in `benchmarks/parity/features`.

- **plain torch** is one process that adds up the gradients of a step's slices before `optimizer.step()`.
- **DDP** is `DistributedDataParallel` with gloo and two processes.
- The job is synchronous. It trains with one worker and one server, and again with two workers and two servers. If the
  two have different bits, or if two workers have different results, the command fails.
- In rows of the process group the job is two ranks of DDP with `init_process_group("paramserver")` and two servers.
- The difference is the largest difference of any number in the weights, the buffers and the optimizer's state at the
  end, and in other values that the script keeps, such as losses, averages or the scale of a GradScaler.
- "bits" is a promise that there is no difference: the command fails if there is a difference. A number in its place is
  the largest difference with which the command does not fail.
- The references use the fused optimizers of torch where torch has them, as servers do
  ([training.md](training.md#optimizers)).

"""


def text(found: Mapping[str, Sequence[tuple[Row, float]]], refused: Sequence[tuple[Refusal, str]]) -> str:
    """The page. ``found``: by subject the rows with their differences; ``refused``: with their sentences."""
    versions = f"paramserver {paramserver.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    lines = [_HEAD + f"Made with {versions}, on {platform.machine()}."]
    for subject, rows in found.items():
        lines += [
            "",
            f"## {subject}",
            "",
            "| feature | reference | largest difference | promised |",
            "|---|---|---|---|",
        ]
        for row, difference in rows:
            promised = f"{row.within:g}" if row.within else "bits"
            lines.append(f"| {row.feature} | {row.reference} | {difference:.2g} | {promised} |")
    lines += ["", "## Refused", "", "The command provokes each refusal, and fails if there is none.", ""]
    lines += ["| given | the sentence |", "|---|---|"]
    lines += [f"| {refusal.what} | {sentence.replace('|', '&#124;')} |" for refusal, sentence in refused]
    return "\n".join(lines) + "\n"
