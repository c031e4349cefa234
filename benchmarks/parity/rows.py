"""A row of docs/parity.md, and its measurement: the same function trains in a job of ours and in plain torch."""

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

from benchmarks.launch import ROOT, RUN_S, call, environment
from benchmarks.parity.sides import Ours, Plain, Side
from paramserver.errors import UserError
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster

PLAIN, DDP = "plain torch, one process", "DDP, gloo, two processes"
GLOO, GROUP = "gloo", "paramserver"
# The processes of DDP, and the slices in a step that their batches are.
RANKS = 2
Tensors = Mapping[str, Tensor]
# The largest difference that sums in another order may make after some tens of steps in float32.
ROUNDING = 2e-6


@dataclass(frozen=True, slots=True)
class Row:
    """A feature, and a function that uses it and returns the trained tensors by name.

    ``within``: the largest difference that is allowed; 0: the bits are the same. ``workers``: the numbers of workers
    with which a job trains; all of them must have the same bits. ``ddp``: options of DistributedDataParallel.
    ``group``: the job is DDP, too, with the process group of the servers. ``job``: how a job is run, with so many
    workers; None: from start to end.
    """

    feature: str
    reference: str
    train: Callable[[Side], Tensors]
    within: float = 0.0
    slices: int = RANKS
    workers: Sequence[int] = (1, 2)
    settings: Mapping[str, object] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    group: bool = False
    job: Callable[[Row, int], Tensors] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused use in words, and a function of a context that provokes the refusal."""

    what: str
    provoke: Callable[[Context], object]


def differences(rows: Sequence[Row]) -> list[float]:
    """For each row the largest difference of any number. Raises RuntimeError if it is larger than the row allows."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        expected = under_ddp(GLOO, [row.feature for row in rows if row.reference == DDP], Path(place))
        of_group = under_ddp(GROUP, [row.feature for row in rows if row.group], Path(place))
        found = []
        for row in rows:
            theirs = expected[row.feature] if row.reference == DDP else row.train(Plain(row.slices))
            try:
                trained = [of_group[row.feature]] if row.group else [job(row, workers) for workers in row.workers]
                found.append(checked(row, theirs, trained))
            except Exception as error:
                raise RuntimeError(f"{row.feature}: {error}") from error
    return found


def checked(row: Row, expected: Tensors, trained: Sequence[Tensors]) -> float:
    """The largest difference of jobs from ``expected``. Raises RuntimeError if it is too large, or depends on the
    number of workers."""
    for other in trained[1:]:
        if difference(other, trained[0]):
            raise RuntimeError(f"{row.workers} workers have different bits")
    found = difference(trained[0], expected)
    if not found <= row.within:
        raise RuntimeError(f"differs from {row.reference} by {found:g}, and not by {row.within:g} at most")
    return found


def job(row: Row, workers: int) -> Tensors:
    """The trained tensors of a job of so many workers, with as many servers."""
    if row.job is not None:
        return row.job(row, workers)
    results = Results(row)
    with Cluster(workers, workers, slices_per_step=row.slices) as cluster:
        cluster.train(results, row.settings)
    return results.same()


class Results:
    """The script of a job's workers, and the trained tensors of each worker. ``side``: makes the side of a worker."""

    def __init__(self, row: Row, side: Callable[[Context], Ours] = Ours) -> None:
        self._row, self._side = row, side
        self._found: dict[int, tuple[Tensors, list[float]]] = {}

    def __call__(self, ctx: Context) -> None:
        side = self._side(ctx)
        self._found[ctx.rank] = self._row.train(side), side.agreed

    def same(self) -> Tensors:
        """The trained tensors that all workers have. Raises RuntimeError if they differ."""
        (found, agreed), *others = self._found.values()
        for other, also in others:
            if agreed != also or difference(other, found):
                raise RuntimeError("workers of a job have different results")
        return found


def under_ddp(backend: str, features: Sequence[str], place: Path) -> dict[str, Tensors]:
    """The trained tensors of two processes of DDP, by feature. Raises RuntimeError if a process fails."""
    if not features:
        return {}
    module = [backend, str(place), "0", *features]
    if backend == GROUP:
        script = [str(Path(__file__).with_name("ddp.py")), "--servers", "2", "--workers", str(RANKS)]
        call([sys.executable, "-m", "paramserver", "run", "--ddp", *script, "--", *module])
    else:
        _ranks(module)
    return {feature: torch.load(place / f"{backend}-{number}.pt") for number, feature in enumerate(features)}


def _ranks(words: Sequence[str]) -> None:
    """The processes of DDP with gloo. Raises RuntimeError if one of them fails."""
    backend, place, _, *features = words
    command = [sys.executable, "-m", "benchmarks.parity.ddp", backend, place]
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
    """The sentence of the refusal. Raises RuntimeError if there is no refusal."""
    with Cluster() as cluster:
        ctx = cluster.context(0)
        try:
            refusal.provoke(ctx)
        except UserError as error:
            return str(error)
        finally:
            cluster.attempt(ctx.close)
    raise RuntimeError(f"{refusal.what}: not refused")
