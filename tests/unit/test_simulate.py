"""The simulator against what is known: the recursion of bounded staleness, and formulas for links."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import pytest

from paramserver.core.consistency import Consistency, Mode
from paramserver.errors import ConfigError
from paramserver.simulate import formulas, maxplus
from paramserver.simulate.blame import NOTHING, Part, between
from paramserver.simulate.clock import VirtualClock
from paramserver.simulate.cluster import simulate
from paramserver.simulate.costs import FREE, Costs
from paramserver.simulate.links import Message, Queue, SendingPort
from paramserver.simulate.scenario import Outcome, Record, Scenario
from paramserver.simulate.stragglers import draws, parse
from paramserver.simulate.suggest import numbers, suggest

SYNC = Consistency(Mode.SYNC)


def asynchronous(staleness: int | None) -> Consistency:
    return Consistency(Mode.ASYNC, staleness)


def job(**given: Any) -> Scenario:
    """Eight workers whose compute takes a second a slice; nothing else takes time."""
    facts: dict[str, Any] = {"workers": 8, "servers": 1, "params": 1_000_000, "compute_s": 1.0, "bandwidth": math.inf}
    facts |= {"costs": FREE, "steps": 60}
    straggler = given.pop("straggler", None)
    return Scenario(**facts | given, stragglers=(parse(straggler),) if straggler else ())


def run(**given: Any) -> tuple[Outcome, Record]:
    return simulate(job(**given))


def drawn(straggler: str, workers: int, steps: int) -> list[list[float]]:
    rows = [draws([parse(straggler)], worker, workers, 0) for worker in range(workers)]
    return [list(row) for row in islice(zip(*rows, strict=True), steps)]


# ---- only computing takes time


@pytest.mark.parametrize("straggler", ["exp:1", "pareto:2.5", "rare:0.02x5", "slow:1x2", "bursts:3x20"])
@pytest.mark.parametrize("staleness", [0, 1, 3, None])
def test_bounded_staleness_agrees_with_the_recursion(straggler: str, staleness: int | None) -> None:
    """Every slice of every worker ends when the recursion says."""
    _, record = run(consistency=asynchronous(staleness), straggler=straggler, servers=2)
    slices = min(map(len, record.spans))
    assert slices > 25
    ends = maxplus.ends(drawn(straggler, 8, slices), staleness)
    for worker, spans in enumerate(record.spans):
        assert [end for _, end in spans[:slices]] == pytest.approx([row[worker] for row in ends], rel=1e-9)
    if staleness is not None:
        assert record.max_clock_spread <= staleness


def test_a_synchronous_step_takes_as_long_as_its_slowest_slice() -> None:
    _, record = run(straggler="exp:1", moves=False)
    steps = [max(row) for row in drawn("exp:1", 8, 60)]
    assert record.published_at == pytest.approx([sum(steps[: count + 1]) for count in range(60)])


# By slices per step: the gain of moving slices over fixed ranges where one of eight workers is twice as slow.
@pytest.mark.parametrize(("slices", "ideal"), [(8, 1.0), (16, 1.33), (32, 1.60), (64, 1.78)])
def test_slices_move_away_from_a_slow_worker(slices: int, ideal: float) -> None:
    fixed, _ = run(straggler="slow:1x2", slices=slices, steps=40, moves=False)
    moving, record = run(straggler="slow:1x2", slices=slices, steps=40)
    assert 0.9 * ideal <= moving.steps_per_s / fixed.steps_per_s <= 1.01 * ideal
    assert (record.moved > 0) == (ideal > 1)


def test_same_scenario_same_outcome_another_seed_another_one() -> None:
    first, again, other = (run(straggler="exp:1", seed=seed)[0] for seed in (1, 1, 2))
    assert first == again != other


# ---- links


def test_a_link_is_shared_by_messages_in_turn() -> None:
    """Two messages of 10 bytes in 5 blocks at 10 bytes per second: both are there at about 2 s, not one at 1 s."""
    clock, receiver = VirtualClock(), Queue()
    sender = SendingPort(clock, 10.0)
    chains: list[tuple[float, ...]] = []
    for _ in range(2):
        sender.send(Message(5, 2.0, receiver, 10.0, Part.WORKER_LINK, Part.SERVER_LINK, 0.0, NOTHING, chains.append))
    clock.run(lambda: len(chains) == 2)
    assert [sum(chain) for chain in chains] == pytest.approx([1.8, 2.0])
    assert clock.now == pytest.approx(2.0)


def test_two_senders_share_the_port_that_receives() -> None:
    clock, receiver = VirtualClock(), Queue()
    chains: list[tuple[float, ...]] = []
    for _ in range(2):
        message = Message(5, 2.0, receiver, 10.0, Part.WORKER_LINK, Part.SERVER_LINK, 0.0, NOTHING, chains.append)
        SendingPort(clock, 10.0).send(message)
    clock.run(lambda: len(chains) == 2)
    assert clock.now == pytest.approx(2.0)
    assert chains[1][Part.SERVER_LINK] == pytest.approx(2.0)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (8, 2), (8, 8), (4, 8)])
def test_a_step_of_communication_takes_what_the_formula_says(workers: int, servers: int) -> None:
    """Gradients go out, then weights come back, through whichever links are fewer."""
    size, bandwidth = 64 * (4 << 20), 1e8
    outcome, _ = run(
        workers=workers, servers=servers, params=size // 4, bandwidth=bandwidth, compute_s=1e-6, steps=10, moves=False
    )
    expected = formulas.dedicated(workers, servers, size, bandwidth, overlapped=False)
    assert 1 / outcome.steps_per_s == pytest.approx(expected, rel=0.1)
    if workers != servers:
        assert outcome.limit == (Part.SERVER_LINK if workers > servers else Part.WORKER_LINK)


def test_the_transport_limits_where_the_link_does_not() -> None:
    costs = Costs(0.0, 0.0, 1e9, 2e9, 0.0, {"sgd": 0.0})
    outcome, _ = run(workers=1, params=250_000_000, compute_s=1e-6, costs=costs, steps=4)
    assert 1 / outcome.steps_per_s == pytest.approx(1.0 + 0.5, rel=0.01)


def test_arithmetic_takes_its_time() -> None:
    """Four contributions are taken in, and one update is applied, for a million parameters."""
    costs = Costs(0.0, 0.0, math.inf, math.inf, 100.0, {"sgd": 50.0})
    outcome, _ = run(workers=4, costs=costs, steps=10)
    assert 1 / outcome.steps_per_s == pytest.approx(1.0 + 0.4 + 0.05)
    assert outcome.step_parts[Part.ARITHMETIC] == pytest.approx(0.45)
    halved, _ = run(workers=4, costs=costs, steps=10, params=2_097_152, servers=2)
    assert halved.step_parts[Part.ARITHMETIC] == pytest.approx(0.45 * 1.048576)


def test_calls_queue_at_a_server() -> None:
    """Four pushes and four pulls of 10 ms each, one after the other; the first worker begins before the last."""
    costs = Costs(0.01, 0.01, math.inf, math.inf, 0.0, {"sgd": 0.0})
    outcome, _ = run(workers=4, costs=costs, steps=10, moves=False)
    assert 1.04 <= 1 / outcome.steps_per_s <= 1.08


# ---- what is reported


@pytest.mark.parametrize("consistency", [SYNC, asynchronous(2)], ids=str)
def test_no_time_is_lost_between_the_parts(consistency: Consistency) -> None:
    """The chain of every version adds up to when it was published."""
    _, record = run(
        consistency=consistency,
        straggler="exp:1",
        servers=3,
        bandwidth=1e7,
        costs=Costs(),
        compute_s=0.5,
        steps=30,
        slices=24,
    )
    assert [sum(chain) for chain in record.chains] == pytest.approx(record.published_at)
    assert all(min(between(NOTHING, chain)) >= 0 for chain in record.chains)


def test_the_slow_worker_is_the_one_that_came_last() -> None:
    outcome, _ = run(straggler="slow:1x1.2", moves=False)
    assert outcome.waited_for == {7: 1.0}
    assert outcome.waiting == pytest.approx(7 / 8 * (1 - 1 / 1.2))
    assert outcome.limit == Part.COMPUTE


def test_updates_in_between_add_up() -> None:
    """Without a bound, eight equal workers: seven others bring an update between a worker's weights and its own."""
    outcome, _ = run(consistency=asynchronous(None), straggler="normal:0.05")
    mean = sum(number * share for number, share in outcome.behind.items())
    assert sum(outcome.behind.values()) == pytest.approx(1.0)
    assert mean == pytest.approx(7.0, rel=0.05)


# ---- how many servers


def test_numbers_of_servers_that_are_tried() -> None:
    assert numbers(1) == [1]
    assert numbers(8) == [1, 2, 3, 4, 6, 8]
    assert numbers(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]


def test_the_smallest_number_of_servers_that_is_enough_is_suggested() -> None:
    """Where links limit, as many as workers; where computing does, one."""
    chunks = 32 * (4 << 20)
    limited = suggest(job(workers=4, params=chunks // 4, bandwidth=1e8, compute_s=1e-3, steps=10))
    assert limited.servers == 4
    assert suggest(job(workers=4, params=1000, bandwidth=1e8, steps=10)).servers == 1


def test_the_formulas_give_the_known_figures() -> None:
    """102 MB, eight workers, 1 Gb/s: seconds per step, and parts of the model by the BytePS split."""
    size, bandwidth = 102e6, 1e9 / 8
    assert formulas.all_reduce(8, size, bandwidth) == pytest.approx(1.43, abs=0.005)
    dedicated = [formulas.dedicated(8, k, size, bandwidth, overlapped=True) for k in (8, 2, 1)]
    assert dedicated == pytest.approx([0.82, 3.26, 6.53], abs=0.005)
    assert formulas.byteps_split(8, 2, size, bandwidth) == pytest.approx(1.20, abs=0.005)
    server, worker = formulas.byteps_shares(8, 2)
    assert 2 * server + 8 * worker == pytest.approx(1.0)
    with pytest.raises(ValueError, match="not for 2 and 3"):
        formulas.byteps_split(2, 3, size, bandwidth)


# ---- bad input


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"workers": 0}, "--workers is 0"),
        ({"servers": 1000}, "--servers is 1000"),
        ({"params": 0}, "--params is 0"),
        ({"compute_s": 0.0}, "--compute is 0 s"),
        ({"bandwidth": 0.0}, "--bandwidth is 0"),
        ({"optimizer": "lion"}, '--optimizer "lion" has no cost; there are sgd'),
    ],
)
def test_impossible_jobs_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        job(**given)
