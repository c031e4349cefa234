"""The simulator against what is known: the recursion of bounded staleness, and formulas for links."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from paramserver.core.layout.placement import Seat, load_of
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.errors import ConfigError
from paramserver.simulate import formulas
from paramserver.simulate.cluster import simulate
from paramserver.simulate.costs import Costs
from paramserver.simulate.machinery.blame import NOTHING, Part, between
from paramserver.simulate.machinery.clock import VirtualClock
from paramserver.simulate.machinery.links import Block, ReceivingPort, SendingPort, Stream
from paramserver.simulate.parts.seats import seating
from paramserver.simulate.parts.stragglers import draws, parse
from paramserver.simulate.scenario import Outcome, Record, Scenario
from paramserver.simulate.suggest import Servers, numbers, suggest
from tests.support.costs import FREE
from tests.support.unit import maxplus

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


class Port:
    """What one host receives at 10 bytes per second, of which others send it 10 bytes at a time in 5 blocks."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.chains: list[tuple[float, ...]] = []
        self._receiver = ReceivingPort(self.clock)

    def sender(self) -> SendingPort:
        return SendingPort(self.clock, 10.0)

    def send(self, sender: SendingPort, weight: float = 1.0) -> None:
        stream = Stream(self._receiver, 10.0, Part.WORKER_LINK, Part.SERVER_LINK, weight)
        for block in range(5):
            delivered = self.chains.append if block == 4 else lambda _: None
            sender.send(Block(stream, 2.0, 0.0, NOTHING, delivered))


def test_a_link_is_shared_by_streams_in_turn() -> None:
    """Two streams of one sender: both are there at about 2 s, not one at 1 s."""
    port = Port()
    sender = port.sender()
    for _ in range(2):
        port.send(sender)
    port.clock.run(lambda: len(port.chains) == 2)
    assert [sum(chain) for chain in port.chains] == pytest.approx([1.8, 2.0])


def test_a_stream_of_more_weight_is_there_sooner() -> None:
    """Four blocks of one to one of the other: done after 7 of 10 blocks."""
    port = Port()
    sender = port.sender()
    port.send(sender)
    port.send(sender, weight=4.0)
    port.clock.run(lambda: len(port.chains) == 2)
    assert [sum(chain) for chain in port.chains] == pytest.approx([1.4, 2.0])


def test_two_senders_share_the_port_that_receives() -> None:
    port = Port()
    for _ in range(2):
        port.send(port.sender())
    port.clock.run(lambda: len(port.chains) == 2)
    assert port.clock.now == pytest.approx(2.0)
    assert port.chains[1][Part.SERVER_LINK] == pytest.approx(2.0)


def step_s(record: Record) -> float:
    """From the first version to the last: weights of version 0 are on their way before."""
    return (record.published_at[-1] - record.published_at[0]) / (len(record.published_at) - 1)


SIZE, BANDWIDTH = 64 * (4 << 20), 1e8
# Fine chunks, since the formulas leave out how a pipeline begins and ends.
LINKS: dict[str, Any] = {"bandwidth": BANDWIDTH, "compute_s": 1e-6, "moves": False, "chunk_bytes": 1 << 20, "steps": 4}


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (8, 2), (8, 8), (4, 8)])
def test_a_step_of_communication_takes_what_the_formula_says(workers: int, servers: int) -> None:
    """Weights come back while gradients still go out, through whichever links are fewer."""
    outcome, record = run(workers=workers, servers=servers, params=SIZE // 4, **LINKS)
    expected = formulas.dedicated(workers, servers, SIZE, BANDWIDTH, overlapped=True)
    assert expected < step_s(record) < 1.15 * expected
    if workers != servers:
        assert outcome.limit == (Part.SERVER_LINK if workers > servers else Part.WORKER_LINK)


@pytest.mark.parametrize(("workers", "servers"), [(4, 1), (8, 4)])
def test_a_model_too_small_to_be_made_ahead_is_pushed_and_then_pulled(workers: int, servers: int) -> None:
    size = servers * 900_000
    _, record = run(workers=workers, servers=servers, params=size // 4, **LINKS | {"chunk_bytes": 1 << 16})
    expected = formulas.dedicated(workers, servers, size, BANDWIDTH, overlapped=False)
    assert 0.97 * expected < step_s(record) < 1.15 * expected


@pytest.mark.parametrize(("alone", "placement"), [(0, "balanced"), (2, "balanced"), (2, "split"), (4, "split")])
def test_servers_beside_workers_take_no_less_than_the_formula_says(alone: int, placement: str) -> None:
    """And no more than the mean of the two bounds that `core.layout.placement` counts with, but for the ends."""
    workers = 8
    scenario = job(servers=alone + workers, params=SIZE // 4, with_server=True, placement=placement, **LINKS)
    took_s = step_s(simulate(scenario)[1])
    seats = [Seat(f"s{i}") for i in range(alone)] + [Seat(f"w{i}", beside_worker=True) for i in range(workers)]
    load = load_of(seating(scenario).plan, seats, workers)
    assert load.at_once / BANDWIDTH < took_s < 1.1 * load.both / 2 / BANDWIDTH
    if placement == "split":
        expected = formulas.byteps_split(workers, alone, SIZE, BANDWIDTH)
        assert load.at_once / BANDWIDTH == pytest.approx(expected, rel=0.02)
        assert took_s < 1.45 * expected


def test_the_transport_limits_where_the_link_does_not() -> None:
    """Pushing at 1 GB/s, while weights come back at 2 GB/s."""
    costs = replace(FREE, push_bytes_s=1e9, pull_bytes_s=2e9)
    outcome, _ = run(workers=1, params=250_000_000, compute_s=1e-6, costs=costs, steps=20)
    assert 1 / outcome.steps_per_s == pytest.approx(1.0, rel=0.05)


def test_arithmetic_takes_its_time() -> None:
    """Four contributions are taken in, and one update is applied, for a million parameters."""
    costs = replace(FREE, sum_ns=100.0, apply_ns={"sgd": 50.0})
    outcome, _ = run(workers=4, costs=costs, steps=10)
    assert 1 / outcome.steps_per_s == pytest.approx(1.0 + 0.4 + 0.05)
    assert outcome.step_parts[Part.ARITHMETIC] == pytest.approx(0.45)
    halved, _ = run(workers=4, costs=costs, steps=10, params=4_194_304, servers=2)
    assert halved.step_parts[Part.ARITHMETIC] == pytest.approx(0.45 * 2.097152)


def test_calls_queue_at_a_server() -> None:
    """Four pushes and four pulls of 10 ms each, one after the other; each worker asks as it pushes."""
    costs = replace(FREE, call_s=0.01, serve_s=0.01)
    outcome, _ = run(workers=4, costs=costs, steps=10, moves=False)
    assert 1.04 <= 1 / outcome.steps_per_s <= 1.085


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
    limited = suggest(job(workers=4, params=chunks // 4, bandwidth=1e8, compute_s=1e-3, steps=4))
    assert limited.enough == Servers(4)
    assert suggest(job(workers=4, params=1000, bandwidth=1e8, steps=10)).enough == Servers(1)


@pytest.mark.long
def test_servers_beside_workers_are_tried_and_suggested_where_they_help() -> None:
    """Eight servers of their own are best, and cost eight machines; some beside the workers are worth it sooner."""
    found = suggest(job(workers=8, params=8_000_000, bandwidth=1e7, compute_s=0.5, steps=4))
    assert {one.alone for one in found.outcomes if one.beside} == {0, 1, 2, 3, 4}
    assert all(one.beside in (0, 8) for one in found.outcomes)
    pure, beside = found.outcomes[Servers(2)], found.outcomes[Servers(2, 8)]
    assert beside.steps_per_s > 1.5 * pure.steps_per_s
    assert not any(one.beside for one in suggest(job(workers=8, hosts=1, params=1000, steps=4)).outcomes)


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
