"""What people are shown of a job with replicas when a server dies, and until each shard has a backup again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from paramserver.cli.look.facts import describe, render
from paramserver.config import ENV_RESTART_COMMAND
from paramserver.core.layout import catching_up
from paramserver.membership import session
from paramserver.v1 import coordinator_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import until, wait
from tests.support.cluster.programs import Program, dataset
from tests.support.failover.takeover import Fleet


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_REPORT_S", 0.1)


class Shown:
    """The status page of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __call__(self) -> dict[str, Any]:
        reply = self._fleet.ask("Coordinator.Status", coordinator_pb2.StatusRequest())
        assert isinstance(reply, coordinator_pb2.StatusResponse)
        return describe(reply)

    def until(self, what: str, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first facts for which this is true."""
        facts = until(what, lambda: now if true(now := self()) else None)
        assert facts is not None
        return facts


def states(facts: dict[str, Any]) -> set[str]:
    return {shard["state"] for shard in facts["shards"]}


def die(fleet: Fleet, index: int) -> None:
    """SIGKILL: the peers of the server notice at once."""

    def kill() -> None:
        keeper = fleet.keepers[index]
        keeper.die()
        fleet.network.hang_up(keeper.process.out)

    fleet.call(kill)


def lines(facts: dict[str, Any]) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(render(facts))
    return captured.get()


@contextmanager
def trains(**options: Any) -> Iterator[tuple[Fleet, Shown]]:
    """A job whose workers are held in their fourth slice until the end of the block. It ends well."""
    reached, released = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if slices == 3:
            reached.set()
            wait(released, "the end of the block", 60.0)

    with Fleet(places=("leader",), **options) as fleet:
        fleet.begin(Program(dataset(48), 4, 2, each=each))
        wait(reached, "the workers in their fourth slice")
        try:
            yield fleet, Shown(fleet)
        finally:
            released.set()
        summary = fleet.finish()
        assert summary["rollbacks"] == 0


def test_a_server_dies_and_another_one_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_RESTART_COMMAND, "docker start here")
    monkeypatch.setattr(catching_up, "GROUP_BYTES", 600)  # a few chunks at a time, so that a part can be seen
    with trains(cluster__replicas=1, cluster__repair_mbps=0.05, training__chunk_bytes=512) as (fleet, look):
        facts = look.until("all shards have backups", lambda facts: states(facts) == {"replicated"})
        assert facts["state"] == "training"
        assert (facts["takeovers"], facts["repairs"]) == (0, 0)
        assert "shards: all 2 replicated" in lines(facts)

        die(fleet, 1)
        facts = look.until("it is missed", lambda facts: facts["lost"] and facts)
        assert facts["state"] == "degraded"
        assert facts["reason"] == (
            "server-1 is lost; server-0 holds its shards, some of them without a backup until a server takes its "
            "place (if nothing starts it again, type: docker start here)"
        )
        assert states(facts) == {"no backup"}
        assert "shards 0, 1 on server-0: no backup" in lines(facts)
        (gone,) = [process for process in facts["processes"] if process["gone"]]
        assert (gone["name"], gone["state"]) == ("server-1", "failed")
        assert gone["reason"].endswith("; server-0 holds its shards")
        others = [process for process in facts["processes"] if not process["gone"] and process["role"] != "coordinator"]
        assert {process["state"] for process in others} <= {"training", "waiting"}
        assert facts["takeovers"] == 1
        assert "backups took over from a lost server once" in lines(facts)

        fleet.serve(1)
        partly = look.until(
            "a part has been sent",
            lambda facts: any(0 < one["share"] < 1 for shard in facts["shards"] for one in shard["backups"]),
        )
        assert partly["state"] == "degraded"
        assert partly["reason"].startswith("server-1 catches up with the shards that it is to hold: ")
        assert "on server-0: catching up " in lines(partly)
        assert " %, on server-1" in lines(partly)
        facts = look.until("all shards have backups again", lambda facts: states(facts) == {"replicated"})
        assert (facts["state"], facts["reason"], facts["repairs"]) == ("training", "", 1)
    assert (fleet.record().takeovers, fleet.record().repairs) == (1, 1)


def test_of_three_servers_the_others_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """They become backups of each other when the lost server does not come. It is missed all the same."""
    monkeypatch.setattr("paramserver.core.procedures.placing.PATIENCE_S", 0.5)
    with trains(servers=3, cluster__replicas=1) as (fleet, look):
        look.until("all shards have backups", lambda facts: states(facts) == {"replicated"})
        die(fleet, 2)
        facts = look.until("all shards have backups again", lambda f: f["lost"] and states(f) == {"replicated"})
        assert facts["state"] == "degraded"
        assert facts["reason"] == "server-2 is lost; server-0, server-1 hold its shards"
        assert (facts["takeovers"], facts["repairs"]) == (1, 1)
        fleet.serve(2)
        look.until("nothing is wrong", lambda facts: facts["state"] == "training")


def test_without_replicas_nothing_is_said_of_copies() -> None:
    with trains() as (_, look):
        facts = look()
        assert not {"shards", "takeovers", "repairs"} & {*facts}
        assert "shards" not in lines(facts)


def test_the_summary_counts_takeovers_and_repairs() -> None:
    reached, released = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if slices == 3:
            reached.set()
            wait(released, "the end of the test", 60.0)

    with Fleet(places=("leader",), cluster__replicas=1) as fleet:
        fleet.begin(Program(dataset(48), 4, 2, each=each))
        wait(reached, "the workers in their fourth slice")
        look = Shown(fleet)
        look.until("all shards have backups", lambda facts: states(facts) == {"replicated"})
        die(fleet, 0)
        look.until("it is missed", lambda facts: facts["lost"])
        fleet.serve(0)
        look.until("all shards have backups again", lambda facts: states(facts) == {"replicated"})
        released.set()
        summary = fleet.finish()
    assert (summary["takeovers"], summary["repairs"], summary["rollbacks"]) == (1, 1, 0)
