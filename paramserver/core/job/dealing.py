"""Dealing out the batches of an evaluation: each is evaluated by one worker, and counts once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# A worker gets the next batches in parts, which become smaller towards the end.
_PART = 32
# Of a batch that was leased or done, beside its result.
_BATCH_BYTES = 128


class Evaluation:
    """The batches ``0`` to ``size - 1`` of one evaluation: free, leased to a worker, or done with a result.

    Memory is for batches that were leased or done, so a large ``size`` alone costs nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._result_bytes = 0
        # Batches from here on were never leased. Those before are leased, done, or free again.
        self._next = 0
        self._free: list[int] = []
        self._leased: dict[int, int] = {}
        self._results: dict[int, bytes] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory: of results, and of the batches that were leased or done."""
        return self._result_bytes + _BATCH_BYTES * self._next

    @property
    def complete(self) -> bool:
        """Whether each batch has a result."""
        return len(self._results) == self.size

    def lease(self, worker: int, workers: int) -> list[int]:
        """The next batches for a worker, in order; empty if none is free. ``workers``: how many share them."""
        left = self.size - self._next + len(self._free)
        want = min(max(1, left // (2 * max(1, workers))), _PART, left)
        taken = self._free[:want]
        del self._free[:want]
        fresh = want - len(taken)
        taken += range(self._next, self._next + fresh)
        self._next += fresh
        self._leased.update(dict.fromkeys(taken, worker))
        return taken

    def give_back(self, worker: int) -> bool:
        """The batches that a worker has leased are free again; whether there were any."""
        return self._release(index for index, holder in self._leased.items() if holder == worker)

    def take_from_others(self, worker: int) -> bool:
        """The batches that all other workers have leased are free again; whether there were any."""
        return self._release(index for index, holder in self._leased.items() if holder != worker)

    def done(self, index: int, result: bytes) -> bool:
        """A batch has a result; False if it is not needed.

        The first one counts. One that was not leased here, but by an earlier coordinator, is evaluated once more.
        """
        if not 0 <= index < self._next or index in self._results:
            return False
        self._leased.pop(index, None)
        if index in self._free:
            self._free.remove(index)
        self._results[index] = result
        self._result_bytes += len(result)
        return True

    def results(self, first: int, nbytes: int) -> list[tuple[int, bytes]]:
        """Results from batch ``first`` on, in order: about ``nbytes`` bytes, at least one if there is one."""
        found: list[tuple[int, bytes]] = []
        for index in range(first, self.size):
            if index not in self._results or (found and nbytes <= 0):
                break
            found.append((index, self._results[index]))
            nbytes -= len(self._results[index]) + 8
        return found

    def holders(self) -> Sequence[int]:
        """The workers that have leased batches."""
        return sorted(set(self._leased.values()))

    def _release(self, indices: Iterable[int]) -> bool:
        released = list(indices)
        for index in released:
            del self._leased[index]
        self._free = sorted([*self._free, *released])
        return bool(released)
