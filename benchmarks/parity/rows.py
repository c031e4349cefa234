"""What a row of docs/parity.md is, and how it is measured: the same function trains here and in plain torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.launch import ROOT, RUN_S, environment
from benchmarks.parity.sides import Ours, Plain, Side
from paramserver.errors import UserError
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster

PLAIN, DDP = "plain torch, one process", "DDP, gloo, two processes"
# The processes of DDP, and the slices in a step that their batches are.
RANKS = 2
Tensors = Mapping[str, Tensor]
# What sums in another order may change after some tens of steps in float32.
ROUNDING = 2e-6


@dataclass(frozen=True, slots=True)
class Row:
    """A feature, and a function that uses it and returns what it has trained, by name.

    ``within``: the largest difference that is allowed; 0: the bits are the same. ``workers``: the numbers of workers
    with which a job trains; all of them must have the same bits. ``ddp``: options of DistributedDataParallel.
    """

    feature: str
    reference: str
    train: Callable[[Side], Tensors]
    within: float = 0.0
    slices: int = RANKS
    workers: Sequence[int] = (1, 2)
    settings: Mapping[str, object] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is refused, and a function of a context that provokes it."""

    what: str
    provoke: Callable[[Context], object]


def differences(rows: Sequence[Row]) -> list[float]:
    """For each row the largest difference of any number. Raises RuntimeError if it is larger than the row allows."""
    torch.set_num_threads(1)
    with_ddp = [number for number, row in enumerate(rows) if row.reference == DDP]
    with tempfile.TemporaryDirectory() as place:
        under_ddp([rows[number].feature for number in with_ddp], Path(place))
        found = []
        for number, row in enumerate(rows):
            if number in with_ddp:
                expected = torch.load(Path(place) / f"{with_ddp.index(number)}.pt")
            else:
                expected = row.train(Plain(row.slices))
            try:
                found.append(checked(row, expected))
            except Exception as error:
                raise RuntimeError(f"{row.feature}: {error}") from error
    return found


def checked(row: Row, expected: Tensors) -> float:
    """The largest difference of a job from ``expected``. Raises RuntimeError if it is too large, or depends on the
    number of workers."""
    trained = [ours(row, workers) for workers in row.workers]
    for other in trained[1:]:
        if difference(other, trained[0]):
            raise RuntimeError(f"{row.workers} workers have different bits")
    found = difference(trained[0], expected)
    if not found <= row.within:
        raise RuntimeError(f"differs from {row.reference} by {found:g}, and not by {row.within:g} at most")
    return found


def ours(row: Row, workers: int) -> Tensors:
    """What worker 0 of a job has trained, with as many servers as workers."""
    results: dict[int, Tensors] = {}

    def script(ctx: Context) -> None:
        results[ctx.rank] = row.train(Ours(ctx))

    with Cluster(workers, workers, slices_per_step=row.slices) as cluster:
        cluster.train(script, row.settings)
    return results[0]


def under_ddp(features: Sequence[str], place: Path) -> None:
    """Train these rows under DDP; the results are ``0.pt`` and so on. Raises RuntimeError if a process fails."""
    if not features:
        return
    command = [sys.executable, "-m", "benchmarks.parity.ddp", str(place)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), *features],
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=RUN_S)[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"DDP took longer than {RUN_S:g} s") from error
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("DDP failed:\n" + "\n".join(said))


def difference(one: Tensors, other: Tensors) -> float:
    """The largest difference of two numbers in the same place. Raises RuntimeError if names or shapes differ."""
    if one.keys() != other.keys():
        raise RuntimeError(f"there is {sorted(one)} on one side and {sorted(other)} on the other side")
    largest = 0.0
    for name, mine in one.items():
        theirs = other[name]
        if mine.shape != theirs.shape:
            raise RuntimeError(f"{name} has the shapes {tuple(mine.shape)} and {tuple(theirs.shape)}")
        gap = (mine.double() - theirs.double()).abs()
        if not bool(gap.isfinite().all()):
            raise RuntimeError(f"{name} has numbers that are not finite")
        largest = max(largest, gap.max().item() if gap.numel() else 0.0)
    return largest


def sentence(refusal: Refusal) -> str:
    """The sentence with which it is refused. Raises RuntimeError if it is not."""
    with Cluster() as cluster:
        ctx = cluster.context(0)
        try:
            refusal.provoke(ctx)
        except UserError as error:
            return str(error)
        finally:
            cluster.attempt(ctx.close)
    raise RuntimeError(f"{refusal.what}: not refused")
