"""A step on one host is one message there and one back; whatever comes between, the bits are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from paramserver import errors
from paramserver.server.rpc.contributions import Contributions
from paramserver.server.rpc.pulls import Pulls
from paramserver.v1 import shard_pb2
from paramserver.worker.links import exchange
from tests.support.cluster.harness import Cluster, Outcome, train
from tests.support.cluster.programs import Program, dataset
from tests.support.contract.movers import LateMover, imagine

# Two workers, three steps an epoch.
SCRIPT = Program(dataset(48), 8)
SLICES = 12
SETTINGS = {"training.chunk_bytes": 832}


def on_one_host(servers: int = 1) -> Outcome:
    with Cluster(workers=2, servers=servers, transport="shm") as cluster:
        return cluster.train(SCRIPT, SETTINGS)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Pushes and exchanges as servers answer them."""
    calls: Counter[str] = Counter()
    once, count = Pulls.exchange, Contributions.count

    async def exchanged(self: Pulls, request: shard_pb2.ExchangeRequest) -> shard_pb2.ExchangeResponse:
        response = await once(self, request)
        calls["exchange"] += request.HasField("push") and response.pulled.ready
        return response

    async def pushed(self: Contributions, *contribution: object) -> shard_pb2.PushResponse:
        calls["push"] += 1
        return await count(self, *contribution)  # type: ignore[arg-type]

    monkeypatch.setattr(Pulls, "exchange", exchanged)
    monkeypatch.setattr(Contributions, "count", pushed)
    return calls


@pytest.fixture(
    params=[pytest.param(False, id="in main memory"), pytest.param(True, id="on a device", marks=pytest.mark.long)]
)
def movers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LateMover]]:
    """The copies of a device that each worker has, if any."""
    made = imagine(monkeypatch) if request.param else []
    yield made
    assert [mover.mistakes for mover in made] == [[] for _ in made]
    assert all(mover.fetched >= SLICES // 2 for mover in made)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_step_is_one_call(servers: int, movers: list[LateMover], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train(SCRIPT, workers=2, settings=SETTINGS).digests
    movers.clear()
    monkeypatch.setattr(exchange, "MOST_S", 20.0)
    monkeypatch.setattr("paramserver.core.work.speed.Speed.patience_s", lambda _: 20.0)
    calls = counted(monkeypatch)
    outcome = on_one_host(servers)
    assert calls == {"exchange": SLICES * servers, "push": SLICES * servers}
    assert outcome.digests == wanted


@pytest.mark.parametrize("what", ["late", "refused", "lost"])
def test_what_does_not_come_about_is_done_as_elsewhere(
    what: str, movers: list[LateMover], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next version is not there in time; the server refuses the call; it has counted the push, but says nothing."""
    wanted = train(SCRIPT, workers=2, settings=SETTINGS).digests
    movers.clear()
    broken = 0
    once = Pulls.exchange

    async def exchanged(self: Pulls, request: shard_pb2.ExchangeRequest) -> shard_pb2.ExchangeResponse:
        nonlocal broken
        if not (request.HasField("push") and request.HasField("pull")):  # the general way
            return await once(self, request)
        broken += 1
        if what == "refused":
            raise errors.OverloadedError("not now")
        response = await once(self, request)
        if what == "lost":
            raise errors.UnavailableError("the answer is lost")
        return response

    monkeypatch.setattr(Pulls, "exchange", exchanged)
    if what == "late":
        monkeypatch.setattr(exchange, "MOST_S", 0.0)
    assert on_one_host().digests == wanted
    assert broken >= SLICES / 2
