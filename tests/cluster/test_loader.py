"""The loader, with slices that nobody foresaw in between: what was loaded ahead is used all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from paramserver.core.versions.names import SyncName
from paramserver.core.work.slices import slice_indices
from paramserver.worker.data.described import describe_loader
from paramserver.worker.pace import Item
from paramserver.worker.script.loader import IndexedBatches, SliceLoader

SAMPLES, BATCH = 40, 4


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index * index])


def item(index: int, unplanned: bool = False) -> Item:
    return Item(SyncName(0, index, index + 1, 10), 0, index, unplanned)


class Position:
    """Hands out these slices; the others that are foreseen are those of the own range, in order."""

    def __init__(self, items: list[Item], own: list[int]) -> None:
        self._items, self._own = iter(items), own
        self.feeds = 0
        self.skipped: set[int] = set()
        self.given: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        pass

    def begin_pass(self) -> int:
        return 1

    def next_item(self, iteration: int) -> Item | None:
        found = next(self._items, None)
        if found is not None:
            self.given.append(found.index)
        return found

    def leave_pass(self, iteration: int) -> None:
        pass

    def ahead(self) -> Iterator[Item]:
        self.feeds += 1
        return (item(index) for index in self._own if index not in self.skipped)

    def begin(self, item: Item, number: int, of: int, samples: int) -> None:
        pass

    def pass_over(self, item: Item) -> None:
        pass

    def go_on(self) -> None:
        pass

    def end(self, item: Item) -> None:
        pass


@pytest.mark.parametrize("processes", [0, 2])
def test_slices_of_others_come_in_between_and_the_own_ones_are_loaded_once(processes: int) -> None:
    plain = DataLoader(Squares(), batch_size=BATCH, shuffle=True, num_workers=processes)
    data = describe_loader(plain)
    order = [
        item(0),
        item(7, unplanned=True),
        item(1),
        item(9, unplanned=True),
        item(8, unplanned=True),
        item(2),
        item(3),
    ]
    position = Position(order, [0, 1, 2, 3])
    batches = IndexedBatches(plain, data, 5, position)
    loader = SliceLoader(plain, batches, torch.device("cpu"), position, lambda: 1)
    wanted = [slice_indices(data, 5, 0, one.index) for one in order]
    assert [batch[:, 0].tolist() for batch in loader] == wanted
    assert position.feeds == 1


def test_slices_that_others_have_taken_are_left_out() -> None:
    plain = DataLoader(Squares(), batch_size=BATCH, num_workers=2)
    data = describe_loader(plain)
    position = Position([item(0), item(4), item(5)], [0, 1, 2, 3, 4, 5])
    batches = IndexedBatches(plain, data, 5, position)
    loader = SliceLoader(plain, batches, torch.device("cpu"), position, lambda: 1)
    found = []
    for batch in loader:
        found.append(batch[0, 0].item())
        position.skipped.update({1, 2, 3})
    assert found == [0, 4 * BATCH, 5 * BATCH]
