"""Notices what a script draws itself: numbers that nobody seeds, and batches that workers do not share out.

Such numbers depend on the worker that computes the slice, and two workers may draw the same.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import structlog
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from paramserver.worker.data.generators import KINDS

log = structlog.get_logger("paramserver.worker")

# How many frames of the script are looked at: loops are often in functions, and iterators wrapped.
_FRAMES = 4
_WHERE = "in its loop over the prepared loader"
_DEPENDS = (
    "The result depends on which worker computes which slice, and two workers may draw the same: each worker has its "
    "own draws"
)


class OwnDraws:
    """Looks once: at the names that the script has when it gets its first batch, and when it asks for the next one.

    ``seeded``: generators that are seeded for each batch.
    """

    def __init__(self, wanted: bool, seeded: Callable[[], list[Any]]) -> None:
        self._wanted, self._seeded = wanted, seeded
        self._iterator: weakref.ref[Iterator[Any]] | None = None
        # By name: what may be drawn from, and its state.
        self._names: dict[str, tuple[Any, object]] = {}
        self._others = False
        self._seeds = False

    def iterates(self, iterator: Iterator[Any]) -> None:
        """The script begins an iteration over the prepared loader."""
        if self._wanted:
            self._iterator = weakref.ref(iterator)

    def gets(self, frame: types.FrameType | None) -> None:
        """A batch is handed to the script, which called from this frame."""
        if not self._wanted or self._names or self._others:
            return
        seeded = {id(one) for one in self._seeded()}
        for name, value in _names(frame):
            self._others = self._others or isinstance(value, DataLoader)
            if (state := _state(value)) is not None and id(value) not in seeded:
                self._names[name] = value, state
        self._wanted = bool(self._names) or self._others
        self._seeds = False

    def seeds(self) -> None:
        """The script has asked for the seed of its slice, so it seeds its generators."""
        self._seeds = True

    def asks(self) -> None:
        """The script asks for another batch."""
        if not self._wanted:
            return
        self._wanted = False
        for name, (value, state) in self._names.items():
            if _state(value) == state or (self._seeds and isinstance(value, KINDS)):
                continue
            if isinstance(value, KINDS):
                log.warning(
                    f"the script draws from the generator {name!r} {_WHERE}. {_DEPENDS}. Seed it for each batch with "
                    "ctx.slice_seed(), or draw from the functions of torch, NumPy or random, which are seeded"
                )
            else:
                self._tell_of_loader()
        if self._others and self._zipped():
            self._tell_of_loader()
        self._names.clear()

    def _tell_of_loader(self) -> None:
        log.warning(
            f"the script draws batches of another DataLoader {_WHERE}. {_DEPENDS}. Give both data sets to one "
            "DataLoader (torch.utils.data.StackDataset, or a data set that gives samples of both)"
        )

    def _zipped(self) -> bool:
        """Whether the iteration is zipped with one over another loader, or over what may have one inside."""
        mine = self._iterator() if self._iterator is not None else None
        if mine is None:
            return False
        beside = [one for found in gc.get_referrers(mine) if isinstance(found, tuple) for one in found]
        return any(_is_iterator(one) or isinstance(one, itertools.cycle) for one in beside if one is not mine)


class OwnLoops:
    """Looks at two steps of a script that has prepared no loader: whether one DataLoader of its own gave both batches.

    Each worker reads all of such a loader. Iterations are found among the objects of the process.
    """

    def __init__(self) -> None:
        self._wanted = True
        # By iteration that was there at the former step: how many batches it had given.
        self._given: dict[int, int] | None = None

    def steps(self, frame: types.FrameType | None) -> None:
        """The script steps, in this frame, and several workers do so."""
        if not self._wanted:
            return
        objects = gc.get_objects()
        kinds = {id(kind): kind for kind in map(type, objects)}.values()
        iterations = {id(kind) for kind in kinds if _iterates(kind)}
        found = {id(one): one for one in objects if id(type(one)) in iterations and not _shared_out(one)}
        given = {key: getattr(one, "_num_yielded", 0) for key, one in found.items()}
        former, self._given = self._given, given
        if former is None:
            return
        self._wanted = False
        moved = [one for key, one in found.items() if 0 < former.get(key, 0) < given[key]]
        if not moved:
            return
        # One that the script has a name for comes first: others may belong to another thread.
        known = [(name, value.dataset) for name, value in _names(_of_script(frame)) if isinstance(value, DataLoader)]
        names = [name for name, data in known if any(getattr(one, "_dataset", None) is data for one in moved)]
        named = "".join(f": {name!r}" for name in names[:1])
        log.warning(
            f"the script trains on batches of a DataLoader that ctx.prepare has not got{named}. "
            "Each worker reads all of it, so workers train on the same samples instead of sharing them, unless "
            "the script gives each worker other samples. Give the loader to ctx.prepare, and loop over the one "
            "that it returns: model, optimizer, loader = ctx.prepare(model, optimizer, loader)"
        )


def _shared_out(iterator: Any) -> bool:
    """Whether the batches of this iteration may well differ from worker to worker, as the script wants them."""
    sampler = getattr(getattr(iterator, "_index_sampler", None), "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        return True
    drawn = isinstance(sampler, RandomSampler) and sampler.replacement
    return drawn or isinstance(getattr(iterator, "_dataset", None), IterableDataset)


def _of_script(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost frame that is neither of this package nor of torch."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("paramserver", "torch"):
        frame = frame.f_back
    return frame


def _names(frame: types.FrameType | None) -> Iterator[tuple[str, Any]]:
    """What the script's variables are called, and hold, in the functions that are at work."""
    for _ in range(_FRAMES):
        if frame is None:
            return
        here = frame.f_locals
        yield from [*frame.f_globals.items(), *here.items()]
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(here) is dict:
            here.clear()  # until Python 3.12 it is a copy, which the frame would keep
        frame = frame.f_back


def _is_iterator(value: Any) -> bool:
    """Whether this is an iteration over a DataLoader."""
    return _iterates(type(value))


def _iterates(kind: type) -> bool:
    """Whether this class iterates over a DataLoader. Its base has a private name in torch."""
    return any(base.__name__ == "_BaseDataLoaderIter" for base in kind.__mro__)


def _state(value: Any) -> object:
    """What changes when somebody draws from this; None if it is nothing to draw from."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random) and type(value) is not random.SystemRandom:
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return str(value.get_state(legacy=False))
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    return getattr(value, "_num_yielded", None) if _is_iterator(value) else None
