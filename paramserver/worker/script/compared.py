"""Compares the samples of a loader with those of the other workers: slices and batches are named by numbers of samples.

A worker whose data has another order, or other files, would train on samples that another worker evaluates on, and
would compute slices that are not those of the other workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import structlog
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.config import Settings
from paramserver.core.work.passes import SAMPLES
from paramserver.worker.data import probe
from paramserver.worker.data.described import is_stream, sampling_of
from paramserver.worker.data.reading import Single, SliceDataset

log = structlog.get_logger("paramserver.worker")

_RANK_BITS, _MOST = 13, 8
Place = tuple[int, int]


class _Agreeing(Protocol):
    def agree_all(self, name: str, place: Place, value: float) -> Mapping[Place, float]:
        """Give a number for this place of the script; returns all numbers of the name, by place."""


class Compared:
    """Compares the data sets of one worker, each once."""

    def __init__(self, agreeing: _Agreeing, rank: int, settings: Settings) -> None:
        self._agreeing, self._rank, self._seed = agreeing, rank, settings.training.seed
        # A script that trains alone has no other worker.
        self._wanted = settings.training.compare_samples and bool(settings.cluster.coordinator)
        # Data sets that were evaluated, some at most: a script may make another one for each evaluation.
        self._done: list[Any] = []

    def trained(self, loader: DataLoader[Any]) -> None:
        """The loader is prepared. Raises DataError if its samples differ from those of another worker."""
        if self._wanted and not is_stream(loader):
            found = self._read(loader)
            self._compare("data set", SAMPLES, 1, 0, loader, found)
            self._tell(loader, found)

    def evaluated(self, loader: DataLoader[Any], epoch: int, count: int) -> None:
        """The loader is evaluated at this place, for the first time or again. Raises DataError as :meth:`trained`."""
        data = loader.dataset
        if self._wanted and len(self._done) < _MOST and not any(one is data for one in self._done):
            self._done.append(data)
            what = f"{SAMPLES} evaluated {type(loader.dataset).__name__} {_length(loader)}"[:200]
            self._compare("data set of ctx.evaluate", what, epoch + 1, count, loader, self._read(loader))

    def _read(self, loader: DataLoader[Any]) -> probe.Probe:
        indices, single = probe.indices_of(max(0, _length(loader)), self._seed), sampling_of(loader).single
        read = SliceDataset(loader.dataset, loader.collate_fn)

        def begin() -> None:
            if loader.num_workers and loader.worker_init_fn is not None:
                loader.worker_init_fn(0)

        def sample(index: int, seed: int) -> Any:
            return read.__getitems__([seed, -1, index])[0]

        collate = Single(loader.collate_fn) if single else loader.collate_fn
        return probe.read(indices, self._seed, sample, collate, begin)

    def _compare(
        self, what: str, name: str, epoch: int, count: int, loader: DataLoader[Any], found: probe.Probe
    ) -> None:
        first, length = count * (probe.NUMBERS + 1) + 1, _length(loader)
        mine = [float(max(0, length) << _RANK_BITS | self._rank), *found.numbers(self._rank)]
        known: Mapping[Place, float] = {}
        for number, value in enumerate(mine):
            known = self._agreeing.agree_all(name, (epoch, first + number), value)
            theirs = int(known[epoch, first + number])
            if number == 0 and theirs >> _RANK_BITS != max(0, length):
                raise errors.DataError(
                    f"the {what} has {length} samples here (worker-{self._rank}), and {theirs >> _RANK_BITS} in "
                    f"worker-{theirs & ((1 << _RANK_BITS) - 1)}: give all workers the same data"
                )
            if number and (one := found.differs(number - 1, theirs)) is not None:
                raise errors.DataError(_differs(what, self._rank, *one))
        groups = {(at, (k - 1) // len(mine)) for at, k in known} - {(epoch, count)}
        if groups and not any(self._matches(found, known, *group) for group in groups):
            log.warning(
                f"the {what} has other samples here (worker-{self._rank}) than those that other workers have "
                "evaluated, or another order: give all workers the same data"
            )

    def _matches(self, found: probe.Probe, known: Mapping[Place, float], epoch: int, count: int) -> bool:
        """Whether the samples are those that a worker has evaluated at this place."""
        first = count * (probe.NUMBERS + 1) + 2
        numbers = (known.get((epoch, first + number)) for number in range(probe.NUMBERS))
        return all(value is None or found.differs(k, value) is None for k, value in enumerate(numbers))

    def _tell(self, loader: DataLoader[Any], found: probe.Probe) -> None:
        if found.chance and self._rank == 0:
            log.warning(
                f"{found.chance} of the {type(loader.dataset).__name__} differs when it is read again with the same "
                "seeds, so the result depends on which worker reads it, and workers may draw the same numbers: draw "
                "from the functions of torch, NumPy or random, or from a generator that is an attribute of the data "
                "set, its transforms or collate_fn, which are seeded for each batch"
            )
        for what, value in (("a sample cannot be read", found.failed), ("samples hold a", found.unknown)):
            if value:
                log.info("samples are not wholly compared with those of other workers", reason=f"{what}: {value}")


def _differs(what: str, mine: int, index: int, other: int) -> str:
    return (
        f"sample {index} of the {what} is another one here (worker-{mine}) than in worker-{other}: all workers need "
        "the same samples in the same order, so sort what os.listdir or a set gives, and shuffle or split after "
        "ps.init(), which seeds torch, NumPy and random; if samples are meant to differ, set "
        "training.compare_samples=false"
    )


def _length(loader: DataLoader[Any]) -> int:
    """How many samples the data set has; -1 if it does not say, as behind a sampler."""
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return -1
