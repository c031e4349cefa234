"""``ctx.evaluate``: the batches of a second loader, shared out to all workers, and the results of all of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.core.work.slices import slice_seed
from paramserver.worker.data.described import describe_loader, is_stream, sampling_of
from paramserver.worker.data.moved import to_device
from paramserver.worker.data.order import order_of
from paramserver.worker.data.reading import inner_loader
from paramserver.worker.data.seeding import restore, states
from paramserver.worker.data.values import decode, encode
from paramserver.worker.engine.evaluating import Dealt
from paramserver.worker.script.compared import Compared

# Gives the evaluation of so many batches at this place of the script, and the place: its epoch and count.
Begin = Callable[[int], tuple[Dealt, int, int]]


class Evaluations:
    """The evaluations of a script, one after the other."""

    def __init__(
        self, seed: int, device: torch.device, begin: Begin, compared: Compared, seed_model: Callable[[int], None]
    ) -> None:
        self._seed, self._device, self._begin = seed, device, begin
        self._compared, self._seed_model = compared, seed_model
        self._present: Evaluation | None = None
        self.gathered: list[Any] | None = None

    def evaluate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """This worker's batches; ends when all batches of all workers have results, which are then in ``gathered``."""
        if self._present is not None:
            raise errors.UserError("the script is in a loop over ctx.evaluate already: evaluate one loader at a time")
        if is_stream(loader):
            raise errors.DataError(
                "ctx.evaluate takes no IterableDataset, whose batches cannot be shared out: read it into a list"
            )
        self.gathered = None
        data = describe_loader(loader)
        dealt, epoch, count = self._begin(data.slices_per_epoch)
        order = order_of(loader, data, self._seed, lambda _, digest: digest)
        self._compared.evaluated(loader, epoch, count)
        number = slice_seed(self._seed, epoch + 1, count, "evaluate")

        def request(index: int) -> list[Any]:
            batches = order.batches(epoch + 1, index)
            return [slice_seed(number, 0, index, "data"), -1, *batches[0]] if batches else []

        self._present = Evaluation(loader, self._device, dealt, request, number, self._seed_model)
        former = states()
        try:
            results = yield from self._present.run()
            while results and not order.shape(epoch + 1, len(results) - 1)[0]:
                results.pop()  # an epoch of the sampler that is shorter than its length
            self.gathered = [decode(result) if result else None for result in results]
        finally:
            self._present = None
            if not sys.is_finalizing():  # as in `SliceLoader`
                restore(former)

    def gather(self, value: Any) -> None:
        """The result of the batch at hand."""
        if self._present is None:
            raise errors.UserError("ctx.gather belongs into a loop over ctx.evaluate(loader)")
        self._present.give(value)


class Evaluation:
    """One evaluation of this worker.

    ``request`` gives for a batch its seed and the epoch -1, followed by the indices of its samples; nothing for one
    without samples.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        dealt: Dealt,
        request: Callable[[int], list[Any]],
        seed: int,
        seed_model: Callable[[int], None],
    ) -> None:
        self._device, self._dealt, self._request, self._seed = device, dealt, request, seed
        self._seed_model = seed_model
        # Its processes end with the last batch: nobody knows whether the script evaluates once more.
        self._inner = inner_loader(loader, self, loader.num_workers, False, None, sampling_of(loader).single)
        # Batches that were leased and not asked for; asked for and not loaded.
        self._leased: deque[int] = deque()
        self._asked: deque[int] = deque()
        self._result: bytes | None = None

    def give(self, value: Any) -> None:
        if self._result is not None:
            raise errors.UserError("ctx.gather was called twice for a batch: give it all in one call, as a dict")
        self._result = encode(value)

    def run(self) -> Generator[Any, None, list[bytes]]:
        """The batches. Returns the results of all workers."""
        left = True
        try:
            while True:
                self._leased.extend(self._dealt.lease(wait=True))
                if self._leased:
                    yield from self._batches()
                elif self._dealt.complete and (results := self._dealt.results()) is not None:
                    left = False
                    return results
        finally:
            if left and not sys.is_finalizing():
                self._dealt.leave()

    def __iter__(self) -> Iterator[list[Any]]:
        """As the batch sampler of the inner loader: what is leased, as far ahead as that loads."""
        while True:
            while self._leased:
                index = self._leased.popleft()
                if request := self._request(index):
                    self._asked.append(index)
                    yield request
                else:
                    self._dealt.give(index, b"")
            self._leased.extend(self._dealt.lease(wait=False))
            if not self._leased:
                return

    def _batches(self) -> Iterator[Any]:
        for batch in self._inner:
            index = self._asked.popleft()
            self._result = None
            self._seed_model(slice_seed(self._seed, 0, index, "model"))
            yield to_device(batch, self._device)
            self._dealt.give(index, self._result or b"")
