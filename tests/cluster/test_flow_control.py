"""Contributions that go to one server after the other, a window of bytes at a time: the same bits, and nobody stuck."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paramserver.core.versions import drafts
from paramserver.worker.gradients import flow_control
from paramserver.worker.gradients.flow_control import Flow
from tests.support.cluster.harness import train
from tests.support.cluster.programs import Program, adamw, dataset, network
from tests.support.cluster.small_job import BAD_STREAMS, SLICES, Death, calm, calm_over, program

DATA = dataset(48)
SMALL = {"training.chunk_bytes": 832}


class Seen:
    """What all contributions of a test met with."""

    def __init__(self) -> None:
        self.told = self.given_up = self.waited = 0


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Small contributions take turns, too, two chunks at a time; servers have told what arrived, and chunks waited."""
    found = Seen()
    acknowledged, room = Flow.acknowledged, Flow.grant

    def told(self: Flow, server: int, chunks: int) -> None:
        found.told += 1
        acknowledged(self, server, chunks)

    def grant(self: Flow) -> None:
        room(self)
        found.waited += bool(self._asking)
        found.given_up += self._given_up

    monkeypatch.setattr(drafts, "DRAFT_BYTES", 0)
    monkeypatch.setattr(flow_control, "_WINDOW_BYTES", 0)
    monkeypatch.setattr(flow_control, "_WINDOW_CHUNKS", 2)
    monkeypatch.setattr(Flow, "acknowledged", told)
    monkeypatch.setattr(Flow, "grant", grant)
    yield found
    assert found.told > 0
    assert found.waited > 0


@pytest.mark.parametrize("servers", [2, 3])
def test_same_bits(servers: int, monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    monkeypatch.setattr(flow_control, "PATIENCE_S", 60.0)  # however busy this machine is
    script = Program(DATA, 8, 2, lambda: network(hidden=300, norm=True), adamw)
    options: dict[str, Any] = {"workers": 2, "servers": servers, "settings": SMALL}
    digests = train(script, **options).digests
    assert not seen.given_up
    told = seen.told
    monkeypatch.setattr(flow_control, "_WINDOW_BYTES", 1 << 30)
    assert train(script, **options).digests == digests
    assert seen.told == told


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_over_a_bad_network(name: str) -> None:
    calm_over(BAD_STREAMS[name], 3, settings=SMALL)


def test_a_worker_dies_in_the_middle_of_a_step() -> None:
    death = Death(1)
    calm(train(program(death), 3, 2, slices_per_step=SLICES, grace_s=0.1, settings=SMALL))
    assert death.died
