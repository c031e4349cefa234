"""Simulated jobs with replicas: the cost of forwarding, and servers that die, come and leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paramserver.core.layout.catching_up import groups, pause_s
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.errors import ConfigError
from paramserver.simulate import events, formulas
from paramserver.simulate.cluster import simulate
from paramserver.simulate.parts.pieces import Piece
from paramserver.simulate.scenario import Outcome, Record, Scenario
from tests.support.costs import FREE

MODES = [Consistency(Mode.SYNC), Consistency(Mode.ASYNC, 1)]


def run(happens: Sequence[str] = (), **given: Any) -> tuple[Outcome, Record]:
    """Three workers and servers whose links carry 100 MB/s; a slice takes a second."""
    facts: dict[str, Any] = {"workers": 3, "servers": 3, "params": 1_000_000, "compute_s": 1.0, "bandwidth": 1e8}
    facts |= {"costs": FREE, "steps": 20, "replicas": 1, "events": tuple(map(events.parse, happens))}
    return simulate(Scenario(**facts | given))


def texts(record: Record) -> list[str]:
    return [one.text for one in record.happened]


@pytest.mark.parametrize("consistency", MODES, ids=str)
def test_on_free_links_replicas_cost_nothing(consistency: Consistency) -> None:
    outcome, record = run(bandwidth=1e15, consistency=consistency)
    assert outcome.slices_per_s == pytest.approx(3.0, rel=1e-6)
    assert record.applied == 60


def test_forwarding_costs_what_the_formula_says() -> None:
    """Four workers and four servers: 1 + 1/4 on the servers' links, of which the drafts hide the latency."""
    seconds = {}
    for replicas in (0, 1):
        outcome, _ = run(workers=4, servers=4, params=6_000_000, compute_s=1e-3, bandwidth=1.25e7, replicas=replicas)
        seconds[replicas] = 1 / outcome.steps_per_s
        formula = formulas.dedicated(4, 4, 24e6, 1.25e7, overlapped=True, replicas=replicas)
        assert formula <= seconds[replicas] < 1.16 * formula
    assert 1.15 < seconds[1] / seconds[0] < 1.3


def test_a_shard_without_chunks_is_replicated_too() -> None:
    """One chunk for six shards."""
    _, record = run(["kill:1@5.5s", "start:1@8.2s"], params=1000)
    assert texts(record)[-1] == "all shards have their backups, and are spread evenly"
    assert record.applied == 60


@pytest.mark.parametrize("consistency", MODES, ids=str)
def test_a_server_dies_and_every_slice_counts_once(consistency: Consistency) -> None:
    outcome, record = run(["kill:1@5.5s", "start:1@8.2s"], consistency=consistency)
    assert record.applied == 60
    assert record.published_at == sorted(record.published_at)
    assert texts(record)[:2] == ["server-1 dies", "2 shards of server-1 to other servers"]
    assert texts(record)[-1] == "all shards have their backups, and are spread evenly"
    assert outcome.slices_per_s > 2.5


def test_a_server_that_dies_costs_less_than_a_second_and_no_step() -> None:
    """It dies while contributions come: workers bring them again, to the shards that it had."""
    quiet, _ = run()
    for tenth in range(10):
        died, record = run([f"kill:1@{5 + tenth / 10}s"])
        assert 20 / died.steps_per_s - 20 / quiet.steps_per_s < 1.0
        assert len(record.published_at) == 20


def test_a_machine_that_is_cut_off_is_waited_for_until_its_lease_ends() -> None:
    _, record = run(["cut:1@5.5s"], lease_s=3.0)
    lost = next(one for one in record.happened if "other servers" in one.text)
    assert lost.at_s == pytest.approx(8.5)
    assert max(b - a for a, b in zip(record.published_at, record.published_at[1:], strict=False)) > 2.5


def test_a_server_that_leaves_costs_no_detection() -> None:
    _, left = run(["drain:2@5.5s", "start:2@7.2s"])
    assert texts(left)[:2] == ["server-2 is to leave", "2 shards of server-2 to other servers"]
    assert left.happened[0].at_s == left.happened[1].at_s
    assert texts(left)[-1] == "all shards have their backups, and are spread evenly"
    assert left.applied == 60


def test_repair_takes_as_long_as_its_rate_says() -> None:
    """Two thirds of a model of 40 MB to the server that comes, each of its four shards at 10 MB/s beside the others."""
    job: dict[str, Any] = {"params": 10_000_000, "bandwidth": 1e9, "steps": 40}
    whole = []
    for mbps in (80.0, 20.0):
        _, record = run(["kill:1@5.5s", "start:1@8.2s"], repair_mbps=mbps, **job)
        whole.append(next(one.at_s for one in record.happened if one.text.endswith("evenly")) - 8.2)
    assert whole[1] > 2.0 * whole[0]


def test_without_backups_nobody_takes_over() -> None:
    with pytest.raises(ConfigError, match="a part of the model is on no server any more"):
        run(["kill:1@5.5s", "kill:0@5.6s"])
    with pytest.raises(ConfigError, match="no other server has a copy"):
        run(["kill:1@5.5s", "drain:0@5.8s"])


def test_a_new_backup_is_sent_groups_at_a_rate() -> None:
    chunks = [Piece(1 << 20, 0.0) for _ in range(5)]
    assert [len(group) for group in groups(chunks)] == [2, 2, 1]
    assert groups([]) == [[]]
    assert pause_s(1_000_000, 0.5, 8.0) == pytest.approx(0.5)
    assert pause_s(1_000_000, 2.0, 8.0) == pause_s(1_000_000, 0.0, 0.0) == 0.0
