"""A torch ``DataLoader`` whose sampler is replaced: it yields the slices that this worker is to compute."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.core.work.slices import DataSpec, places_of, slice_seed
from paramserver.worker.data.described import check_cut, cut_of, sampling_of
from paramserver.worker.data.moved import to_device
from paramserver.worker.data.order import Agree, order_of
from paramserver.worker.data.own_draws import OwnDraws
from paramserver.worker.data.reading import inner_loader
from paramserver.worker.data.streams import Stream
from paramserver.worker.pace import Item

# What processes of a loader are made with. A script may change it between two passes.
_CHANGING = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("prefetch_factor", "multiprocessing_context"),
)
# What a DataLoader is made with: scripts look at it, for example to make another one, or change it.
_OPTIONS = frozenset(
    (
        *_CHANGING,
        *("dataset", "sampler", "batch_sampler", "batch_size", "drop_last", "persistent_workers", "pin_memory_device"),
    )
)
# A batch of a slice, by its number within the slice.
_Part = tuple[Item, int]


class _Requests:
    """The batch sampler of the inner loader: one request per batch, as far ahead as the loader prefetches."""

    def __init__(self, requests: Callable[[Item], list[list[Any]]]) -> None:
        """``requests`` gives those for the batches of a slice."""
        self._requests = requests
        self.items: Iterator[Item] = iter(())
        self.issued: deque[_Part] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        for item in self.items:
            for number, request in enumerate(self._requests(item)):
                self.issued.append((item, number))
                yield request


class _Unplanned:
    """Loads batches of unplanned slices, one at a time, so that batches that were loaded ahead are kept."""

    def __init__(self, make: Callable[[list[list[Any]]], DataLoader[Any]]) -> None:
        """``make`` gives a loader for a list of requests; it is called when the first batch is wanted."""
        self._make = make
        self._wanted: list[list[Any]] = []
        self._loader: DataLoader[Any] | None = None

    def load(self, request: list[Any]) -> Any:
        """The batch of this request."""
        if self._loader is None:
            self._loader = self._make(self._wanted)
        self._wanted[:] = [request]
        (batch,) = self._loader
        return batch

    def close(self) -> None:
        """End its process, if there is one."""
        self._loader = None


class LoopPosition(Protocol):
    """The script's position in its epochs, as the loader needs it; `script.position` has it."""

    def set_epoch(self, epoch: int) -> None:
        """The script says the number of the epoch that its next iteration is."""

    def begin_pass(self) -> int:
        """An iteration over the loader begins; returns its number. Raises UserError if none may begin."""

    def next_item(self, iteration: int) -> Item | None:
        """The slice to compute now, None at the end of the epoch."""

    def leave_pass(self, iteration: int) -> None:
        """The iteration of this number is over, at its end or before (``break``)."""

    def ahead(self) -> Iterator[Item]:
        """The slices that are likely to come."""

    def begin(self, item: Item, number: int, of: int, samples: int) -> None:
        """Batch ``number`` (from 0) of the ``of`` batches of a slice is about to be handed to the script.

        ``samples``: of the whole slice.
        """

    def go_on(self) -> None:
        """The script asks for another batch of the slice."""

    def pass_over(self, item: Item) -> None:
        """The slice has no batches."""

    def end(self, item: Item) -> None:
        """The script asks for the batch after the last one of this slice."""


class Batches(Protocol):
    """The batches of slices: those of a data set with indices, or those of a stream."""

    def begin_pass(self) -> None:
        """The script begins an iteration. Raises DataError if it has changed by what slices are cut."""

    def shape(self, item: Item) -> tuple[int, int]:
        """How many batches and samples a slice has. It is asked before the slice's first batch."""

    def batch(self, item: Item, number: int) -> Any:
        """A batch of this slice. Raises RolledBackError for the first one if the job goes back."""

    def close(self) -> None:
        """Throw away batches that were loaded ahead, and end what loads them."""


class IndexedBatches:
    """Batches of a data set with indices, loaded ahead as the script's loader does it."""

    def __init__(
        self,
        loader: DataLoader[Any],
        data: DataSpec,
        seed: int,
        position: LoopPosition,
        agree: Agree = lambda epoch, digest: digest,
        number_of: Callable[[int], int] = lambda epoch: epoch,
    ) -> None:
        """``number_of`` gives the number that an epoch of the job has for the script."""
        self._loader, self._data = loader, data
        self._seed, self._turns, self._position, self._number_of = seed, data.turns, position, number_of
        self._order = order_of(loader, data, seed, agree)
        self._cut, self._options = cut_of(loader, data), _options(loader)
        self._attributes = _attributes(loader)
        self._requests = _Requests(self._requests_of)
        self._inner, self._unplanned = self._make()
        self._feed: Iterator[Any] | None = None

    def _make(self) -> tuple[DataLoader[Any], _Unplanned]:
        """The loaders that read, with the options that the script's loader has now."""
        loader, single = self._loader, sampling_of(self._loader).single
        processes = min(1, loader.num_workers)

        def unplanned(requests: list[list[Any]]) -> DataLoader[Any]:
            return inner_loader(loader, requests, processes, processes > 0, None, single)

        persistent = loader.persistent_workers and loader.num_workers > 0
        inner = inner_loader(loader, self._requests, loader.num_workers, persistent, loader.generator, single)
        return inner, _Unplanned(unplanned)

    def begin_pass(self) -> None:
        """As torch's loader does it for each iteration: follow what the script has changed."""
        check_cut(self._loader, self._data, self._cut)
        now, attributes = _options(self._loader), _attributes(self._loader)
        if attributes != self._attributes or any(
            one is not other for one, other in zip(now, self._options, strict=True)
        ):
            self.close()
            self._options, self._attributes = now, attributes
            self._inner, self._unplanned = self._make()

    def shape(self, item: Item) -> tuple[int, int]:
        """How many batches and samples a slice has."""
        return self._order.shape(self._number_of(item.epoch), item.index)

    def batch(self, item: Item, number: int) -> Any:
        """A batch of this slice."""
        try:
            return self._batch(item, number)
        except errors.RolledBackError:  # raised by `ahead`; `next_item` follows the job
            self._drop()
            if not number:
                raise
            # The script has gradients of this slice, and counts its batches: it gets all of them.
            return self._unplanned.load(self._requests_of(item)[number])

    def close(self) -> None:
        """Throw away batches that were loaded ahead, and end the process for unplanned slices."""
        self._drop()
        self._unplanned.close()

    def _requests_of(self, item: Item) -> list[list[Any]]:
        """For each batch of the slice its seed and epoch, followed by the indices of its samples."""
        epoch = self._number_of(item.epoch)
        of_slice = self._seed, epoch, item.index // self._turns
        return [
            [slice_seed(*of_slice, of_batch("data", number)), epoch, *indices]
            for number, indices in enumerate(self._order.batches(epoch, item.index))
        ]

    def _batch(self, item: Item, number: int) -> Any:
        """A batch of this slice: from the running feed if it is coming there, else from a new one."""
        if item.unplanned or (number and self._feed is None):
            return self._unplanned.load(self._requests_of(item)[number])
        for _ in range(2):
            if self._feed is None:
                self._requests.items = self._position.ahead()
                self._feed = iter(self._inner)
            for batch in self._feed:
                if self._requests.issued.popleft() == (item, number):
                    return batch
                if (item, number) not in self._requests.issued:
                    break
            self._drop()
        raise AssertionError(f"the slices ahead do not begin with {item}")

    def _drop(self) -> None:
        self._feed = None
        self._requests.issued.clear()


class StreamBatches:
    """Batches of an ``IterableDataset``. Those of a slice are read before the first of them is handed out."""

    def __init__(
        self, data: DataSpec, stream: Stream, loader: DataLoader[Any], number_of: Callable[[int], int]
    ) -> None:
        self._data, self._stream, self._loader, self._number_of = data, stream, loader, number_of
        self._cut = cut_of(loader, data)
        self._have: list[Any] = []

    def begin_pass(self) -> None:
        """The stream follows what else has changed."""
        check_cut(self._loader, self._data, self._cut)

    def shape(self, item: Item) -> tuple[int, int]:
        """Read the batches of a slice; how many there are, and how many samples."""
        epoch = self._number_of(item.epoch)
        read = (self._stream.batch(epoch, number) for number in range(*places_of(self._data, item.index)))
        found = [one for one in read if one is not None]
        self._have = [batch for _, batch in found]
        return len(found), sum(samples for samples, _ in found)

    def batch(self, item: Item, number: int) -> Any:
        """A batch of the slice that was read last."""
        return self._have[number]

    def close(self) -> None:
        """Throw the batches away, and close the stream."""
        self._have = []
        self._stream.close()


class SliceLoader:
    """Replaces a DataLoader in ``ctx.prepare``. Iterating gives this worker's slices of the present epoch, in batches.

    It has the options of the script's loader, such as ``num_workers`` and ``collate_fn``. What torch allows to change
    may be changed, on this loader or on the script's, and counts from the next iteration on.
    ``len`` is the number of batches in an epoch, in synchronous mode divided by the slices of a step, as DDP divides it
    by its processes. It is that of the mode in which the job began, and stays when the mode changes. With one batch in
    a slice it is the number of updates of the whole job, and schedules count in it.

    >>> for x, y in loader:
    ...     F.mse_loss(model(x), y).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> len(loader), x.shape
    (4, torch.Size([8, 4]))
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Batches,
        device: torch.device,
        position: LoopPosition,
        length: Callable[[], int],
        own_draws: OwnDraws | None = None,
    ) -> None:
        self.loader = loader
        self._batches, self._device = batches, device
        self._position, self._length = position, length
        self._own_draws = own_draws or OwnDraws(False, list)

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONS:
            return getattr(self.loader, name)
        raise AttributeError(f"the prepared loader has no {name!r}; the DataLoader of the script is its .loader")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPTIONS:  # raises where torch's loader does
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)

    def __len__(self) -> int:
        return self._length()

    def set_epoch(self, epoch: int) -> None:
        """The next loop over this loader is epoch ``epoch``, counted from 0: for a script with its own checkpoints.

        Call it in a plain loop, at least before its first epoch. The order of samples and random numbers of an epoch
        follow from its number. Epochs count on from there. The loop raises UserError for another number than the
        next one.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> for epoch in range(2, 4):  # goes on after epochs 0 and 1
        ...     loader.set_epoch(epoch)
        ...     for x, y in loader:
        ...         F.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        """
        self._position.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._pass()
        self._own_draws.iterates(iterator)
        return iterator

    def _pass(self) -> Iterator[Any]:
        iteration = self._position.begin_pass()
        try:
            self._batches.begin_pass()
            while (item := self._position.next_item(iteration)) is not None:
                of, samples = self._batches.shape(item)
                if not of:  # an epoch that is shorter than others
                    self._position.pass_over(item)
                    continue
                for number in range(of):
                    if number:
                        self._position.go_on()
                    try:
                        batch = self._batches.batch(item, number)
                    except errors.RolledBackError:
                        break
                    self._position.begin(item, number, of, samples)
                    self._own_draws.gets(sys._getframe().f_back)
                    yield to_device(batch, self._device)
                    self._own_draws.asks()
                else:
                    self._position.end(item)
        finally:
            if not sys.is_finalizing():  # an open iterator, at the end of Python: torch must not be called any more
                self._position.leave_pass(iteration)
                self._batches.close()


def _options(loader: DataLoader[Any]) -> list[Any]:
    """What the processes of this loader are made with, now."""
    return [getattr(loader, name) for name in _CHANGING]


def _attributes(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a script may have changed about a data set of which processes that go on have a copy; else nothing.

    Processes that start later would have another copy than the first ones. (`set_epoch` reaches all of them.)
    """
    data = loader.dataset
    if not loader.persistent_workers or callable(getattr(data, "set_epoch", None)):
        return {}
    plain = int, float, str, bytes, type(None)
    return {
        name: value if isinstance(value, plain) else id(value) for name, value in getattr(data, "__dict__", {}).items()
    }


def of_batch(purpose: str, number: int) -> str:
    """The purpose of a seed for batch ``number`` (from 0) of a slice."""
    return f"{purpose} {number}" if number else purpose
