"""One of two processes of DistributedDataParallel, which trains rows and writes the results.

python -m benchmarks.parity.ddp BACKEND DIRECTORY RANK FEATURE...
The backend is gloo, or "paramserver" for a script under `paramserver run --ddp`, which says the rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parity.rows import DDP, GLOO, RANKS
from benchmarks.parity.sides import Batch, Data, Torch
from benchmarks.parity.table import ROWS


class Ddp(Torch):
    """A rank. Slice r of each step is the batch, or the batches, of rank r.

    ``options``: of DistributedDataParallel. With ``"join"`` ranks may have different numbers of batches.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._options = dict(options)
        self._join = self._options.pop("join", False)

    def prepare(self, model: Any, optimizer: Any, data: Data) -> tuple[Any, Any, Any]:
        self.model, self.optimizer = DistributedDataParallel(model, **self._options), optimizer
        return self.model, optimizer, self.prepare_data(data)

    def prepare_part(self, name: str, model: Any, optimizer: Any, turns: int = 1) -> tuple[Any, Any]:
        super().prepare_part(name, model, optimizer)
        return DistributedDataParallel(model, **self._options), optimizer

    def prepare_data(self, data: Data) -> Any:
        return _Share(self, data)

    def evaluate(self, data: Data, measure: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """Every second batch, and the results of the others from the other process."""
        batches, rank = list(data.loader()), dist.get_rank()
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, [measure(x, y) for x, y in batches[rank::RANKS]])
        return [found[number % RANKS][number // RANKS] for number in range(len(batches))]

    def agree(self, mine: float) -> float:
        agreed = torch.tensor(mine + dist.get_rank() / 4)
        dist.broadcast(agreed, 0)
        return agreed.item()

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in super().epochs(count):
            if not self._join:
                yield epoch
                continue
            with self.model.join(divide_by_initial_world_size=False):
                yield epoch

    def weighed(self, loss: Tensor) -> Tensor:
        return loss

    def no_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.model.no_sync()
        return context

    @property
    def bare(self) -> nn.Module:
        model: nn.Module = self.model.module
        return model


class _Share:
    """The loader of a rank."""

    def __init__(self, side: Ddp, data: Data) -> None:
        self._side, self._data = side, data

    def __iter__(self) -> Iterator[Batch]:
        rank = dist.get_rank()
        for step in self._data.steps(RANKS, self._side.epoch):
            for _, batches in step[rank : rank + 1]:
                for number, batch in enumerate(batches, 1):
                    self._side.due = number == len(batches)
                    yield batch


def main(backend: str, place: Path, rank: int, features: list[str]) -> None:
    """Train these rows in turn; rank 0 writes ``0.pt`` and so on."""
    torch.set_num_threads(1)
    if backend == GLOO:
        dist.init_process_group(GLOO, init_method=f"file://{place}/meet", rank=rank, world_size=RANKS)
    else:
        dist.init_process_group(backend)
        rank = dist.get_rank()
    rows = {row.feature: row for row in ROWS if row.reference == DDP}
    for number, feature in enumerate(features):
        found = rows[feature].train(Ddp(rows[feature].ddp))
        if rank == 0:
            torch.save(dict(found), place / f"{backend}-{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
