"""Copies between a device and main memory: one suite for what is there, the test's late one, and a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from paramserver.worker.device import CudaMover, Mover, PlainMover, mover_for
from tests.support.contract.movers import LateMover

SIZES = (1, 1000, 1 << 20)
KINDS = ["plain", "late", *(["cuda"] if torch.cuda.is_available() else [])]


class Device:
    """A mover, and where its tensors are."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device("cuda" if kind == "cuda" else "cpu")
        self.mover: Mover = PlainMover() if kind == "plain" else LateMover()
        if kind == "cuda":
            self.mover = CudaMover(self.device)

    def computed(self, factor: float = 1.0) -> list[torch.Tensor]:
        """Tensors that the device may not have computed yet."""
        return [torch.arange(size, dtype=torch.float32, device=self.device) * factor for size in SIZES]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device(request.param)
    yield made
    made.mover.release()
    assert getattr(made.mover, "mistakes", []) == []


def expected(factor: float = 1.0) -> list[torch.Tensor]:
    return [torch.arange(size, dtype=torch.float32) * factor for size in SIZES]


def test_what_is_fetched_is_there_once_it_was_waited_for(device: Device) -> None:
    targets = [device.mover.zeros(size, torch.float32) for size in SIZES]
    assert not any(bool(target.any()) for target in targets)
    device.mover.fetch(device.computed(3.0), targets).wait()
    assert all(map(torch.equal, targets, expected(3.0)))


def test_another_thread_may_wait_and_so_may_two(device: Device) -> None:
    targets = [device.mover.zeros(size, torch.float32) for size in SIZES]
    ticket = device.mover.fetch(device.computed(), targets)
    waiting = Thread(target=ticket.wait)
    waiting.start()
    waiting.join(30.0)
    ticket.wait()
    assert all(map(torch.equal, targets, expected()))


def test_what_is_computed_next_finds_what_was_brought(device: Device) -> None:
    sources = [
        device.mover.zeros(size, torch.float32).copy_(want) for size, want in zip(SIZES, expected(), strict=True)
    ]
    targets = device.computed(7.0)
    ticket = device.mover.bring(sources, targets)
    doubled = [target * 2 for target in targets]
    ticket.wait()
    assert all(map(torch.equal, [tensor.cpu() for tensor in doubled], expected(2.0)))


def test_memory_of_others_is_locked_once_and_let_go_of(device: Device) -> None:
    memory = torch.zeros(1 << 20)
    for _ in range(2):
        device.mover.lock(memory, writable=True)
        device.mover.fetch([device.computed()[2]], [memory]).wait()
        assert torch.equal(memory, expected()[2])
        device.mover.release()


def test_the_late_one_notices_who_does_not_wait() -> None:
    mover = LateMover()
    source, target = torch.ones(3), torch.zeros(3)
    ticket = mover.fetch([source], [target])
    assert target.isnan().all()
    source.zero_()
    ticket.wait()
    assert mover.mistakes == ["what a copy reads was changed before it was done"]


def test_nothing_is_moved_on_the_cpu() -> None:
    assert mover_for(torch.device("cpu")) is None
    assert type(mover_for(torch.device("meta"))) is PlainMover
