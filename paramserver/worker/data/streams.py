"""Batches of an ``IterableDataset`` by their number in the epoch: read in order, skipped, and read again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.core.work.slices import slice_seed
from paramserver.worker.data.copies import OwnCollate
from paramserver.worker.data.described import tell_epoch
from paramserver.worker.data.digests import digest_of
from paramserver.worker.data.generators import generators_of, seed_generators
from paramserver.worker.data.order import Agree
from paramserver.worker.data.seeding import restore, seeded, states

# After so many batches the state of a data set is noted, if it has one; so many states are kept.
_NOTED_EVERY, _STATES = 64, 256
# A batch and its number of samples.
Counted = tuple[int, Any]


class _Count:
    """Stands for the ``collate_fn``: counts the samples of a batch. ``single``: the loader makes no batches."""

    def __init__(self, collate: Callable[[Any], Any], single: bool) -> None:
        self.collate, self.single = OwnCollate(collate), single

    def __call__(self, samples: Any) -> Counted:
        return 1 if self.single else len(samples), self.collate(samples)


class Stream:
    """The batches of a loader over an ``IterableDataset``, as torch's own loader gives them.

    Every worker reads the same stream and skips what others compute. So its batches must be the same in all workers:
    generators of the process are seeded for each epoch, and the first batches are compared (``agree``). The last
    ``kept`` batches are at hand for slices that others leave. Anything before is read again: from a state of the data
    set, if it has ``state_dict`` and ``load_state_dict`` and reads in this process, else from the epoch's beginning.
    A copy is kept of what is handed out, as the script may change it in its place. What cannot be copied is not kept.

    ``own``: each worker has a stream of its own, and gives its next batch whatever number is asked for. ``rank`` is in
    its seed.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, agree: Agree, kept: int = 16, own: bool = False, rank: int = 0
    ) -> None:
        self._loader, self._seed, self._agree = loader, seed, agree
        self._kept, self._own, self._rank = kept, own, rank
        self._single = loader.batch_size is None
        data: Any = loader.dataset
        # Generators that data set and collate_fn own: seeded for each epoch. A state of the data set may lack theirs.
        self._generators = generators_of(data, loader.collate_fn)
        stateful = all(hasattr(data, name) for name in ("state_dict", "load_state_dict"))
        self._sought = stateful and not loader.num_workers and not self._generators
        # Epochs begin with it, wherever the data set was left.
        self._first: Any = copy.deepcopy(data.state_dict()) if self._sought else None
        self._epoch, self._next = -1, 0
        self._iterator: Iterator[Counted] | None = None
        # Generators of the process, as the data set has left them.
        self._chance: Any = None
        # Of the present epoch: a script may give the loader another one between two epochs.
        self._collate = loader.collate_fn
        # The number of batches of the epoch, once its end was seen.
        self._end: int | None = None
        self._recent: OrderedDict[int, Counted] = OrderedDict()
        # By number of the next batch: the states of the data set and of the generators.
        self._states: OrderedDict[int, tuple[Any, Any]] = OrderedDict()

    def batch(self, epoch: int, number: int) -> Counted | None:
        """The number of samples and the batch of this number of the epoch; None if the epoch has none."""
        if epoch != self._epoch:
            self._begin(epoch)
        if self._own:
            return self._read()
        if number in self._recent:
            return self._hand_out(number)
        if self._end is not None and number >= self._end:
            return None
        if number < self._next or self._iterator is None:
            self._seek(number)
        while self._next <= number:
            if self._read() is None:
                return None
        return self._hand_out(number)

    def _hand_out(self, number: int) -> Counted:
        samples, batch = self._recent[number]
        try:
            self._recent[number] = samples, copy.deepcopy(batch)
        except Exception:  # of the script's objects
            del self._recent[number]
        return samples, batch

    def close(self) -> None:
        """End the processes of the loader, if it has any. What is read next is then read anew."""
        if self._loader.num_workers and not self._own:
            self._iterator = None

    # ---- reading

    def _begin(self, epoch: int) -> None:
        """Another epoch. Its numbers begin at 0."""
        self._epoch, self._end = epoch, None
        self._collate = self._loader.collate_fn
        self._recent.clear()
        self._states.clear()
        self._open(0)

    def _open(self, at: int) -> None:
        """The next batch that is read is number ``at``: 0, or one whose state is known."""
        loader, data = self._loader, cast(Any, self._loader.dataset)
        self._iterator, self._next = None, at
        tell_epoch(data, self._epoch)
        options: dict[str, Any] = {} if self._single else {"drop_last": loader.drop_last}
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
            options["multiprocessing_context"] = loader.multiprocessing_context
        inner: DataLoader[Any] = DataLoader(
            data,
            loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=_Count(self._collate, self._single),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            **options,
        )
        seed = slice_seed(self._seed, self._epoch, self._rank if self._own else 0, "stream")
        with seeded(seed):
            seed_generators(self._generators, seed)
            if self._sought and not self._own:
                state, chance = self._states.setdefault(at, (self._first, states()))
                data.load_state_dict(copy.deepcopy(state))
                restore(chance)
            self._iterator = iter(inner)
            self._chance = states()

    def _seek(self, number: int) -> None:
        """Go back to the last state before a batch, or to the beginning of the epoch."""
        self._open(max((at for at in self._states if at <= number), default=0))

    def _read(self) -> Counted | None:
        """The next batch; None at the end."""
        if self._end is not None and self._next >= self._end:
            return None
        assert self._iterator is not None
        former = states()
        restore(self._chance)
        try:
            found = next(self._iterator)
        except StopIteration:
            self._end = self._next
            return None
        finally:
            self._chance = states()
            restore(former)
        number, self._next = self._next, self._next + 1
        if not self._own:
            if number == 0:
                self._compare(found)
            self._recent[number] = found
            if len(self._recent) > self._kept:
                self._recent.popitem(last=False)
            if self._sought and self._next % _NOTED_EVERY == 0 and self._next not in self._states:
                self._note()
        return found

    def _note(self) -> None:
        data: Any = self._loader.dataset
        self._states[self._next] = copy.deepcopy(data.state_dict()), self._chance
        if len(self._states) > _STATES:
            del self._states[sorted(self._states)[1]]

    def _compare(self, found: Counted) -> None:
        """Raises DataError if the first batch is another one than in other workers."""
        mine = float(digest_of(found, 6)[0])
        if self._agree(self._epoch, mine) != mine:
            raise errors.DataError(
                f"{type(self._loader.dataset).__name__} gives another first batch in epoch {self._epoch + 1} here than "
                "in another worker: let it give all samples, in an order that follows from set_epoch or from the "
                "generators of torch, NumPy and random; if each worker is to read samples of its own, say "
                "ctx.prepare(..., own_streams=True)"
            )
