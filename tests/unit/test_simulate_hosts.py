"""Simulated hosts: processors that processes share, shared memory, and gradients and weights that leave early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paramserver.core.layout.plan import link_chunk_bytes
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.errors import ConfigError
from paramserver.simulate.cluster import simulate
from paramserver.simulate.machinery.blame import Part
from paramserver.simulate.machinery.clock import VirtualClock
from paramserver.simulate.machinery.cores import Cores, Thread
from paramserver.simulate.parts.seats import seating
from paramserver.simulate.scenario import Outcome, Scenario
from tests.support.costs import FREE

# ---- processors


class Machine:
    """Two cores, and when each piece of work was done."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.cores = Cores(self.clock, 2.0)
        self.done: dict[str, float] = {}

    def run(self, name: str, seconds: float, threads: float = 1.0) -> None:
        self.cores.run(seconds, lambda: self.done.update({name: self.clock.now}), threads)

    def finish(self, count: int) -> dict[str, float]:
        self.clock.run(lambda: len(self.done) == count)
        return self.done


def test_what_has_a_core_of_its_own_is_not_slowed_down() -> None:
    machine = Machine()
    machine.run("a", 1.0)
    machine.run("b", 2.0)
    assert machine.finish(2) == pytest.approx({"a": 1.0, "b": 2.0})


def test_more_threads_than_cores_share_them_evenly() -> None:
    """Four on two cores: at half speed until the first is done, then at two thirds, then each has a core."""
    machine = Machine()
    for name, seconds in {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0}.items():
        machine.run(name, seconds)
    assert machine.finish(4) == pytest.approx({"a": 2.0, "b": 3.5, "c": 4.5, "d": 4.5})


def test_who_comes_later_slows_down_who_is_there() -> None:
    """Two threads for 2 s; after 1 s two more want as much, and all four have half a core each."""
    machine = Machine()
    machine.run("first", 2.0, threads=2.0)
    machine.clock.after(1.0, lambda: machine.run("second", 0.5, threads=2.0))
    assert machine.finish(2) == pytest.approx({"second": 2.0, "first": 2.5})


def test_a_thread_does_one_thing_after_the_other() -> None:
    machine, done = Machine(), list[float]()
    thread = Thread(machine.cores)
    for seconds in (1.0, 0.0, 0.5):
        thread.run(seconds, lambda: done.append(machine.clock.now))
    machine.clock.run(lambda: len(done) == 3)
    assert done == pytest.approx([1.0, 1.0, 1.5])


# ---- whole jobs


def run(**given: Any) -> Outcome:
    facts: dict[str, Any] = {"workers": 2, "servers": 1, "params": 1_000_000, "compute_s": 1.0, "bandwidth": 1e8}
    return simulate(Scenario(**facts | {"costs": FREE, "steps": 20} | given))[0]


def test_on_one_host_no_bytes_travel() -> None:
    slow = {"bandwidth": 1e6, "params": 10_000_000}
    assert run(hosts=1, **slow).steps_per_s == pytest.approx(1.0)
    assert run(**slow).steps_per_s < 0.03


def test_over_grpc_on_one_host_processors_copy() -> None:
    """40 MB out and back at 1 and 1.5 ns per byte at either end, beside each other as the chunks come."""
    costs = replace(FREE, send_ns=1.0, take_ns=1.5)
    one = run(workers=1, hosts=1, transport="grpc", params=10_000_000, costs=costs, compute_s=1e-3, moves=False)
    assert 0.06 < 1 / one.steps_per_s < 0.085
    assert one.limit == Part.COPIES
    both = run(workers=1, hosts=1, transport="grpc", params=10_000_000, costs=costs, compute_s=1e-3, cores=1.0)
    assert 1 / both.steps_per_s == pytest.approx(2 * 40e6 * 2.5e-9 + 1e-3, rel=0.02)


def test_workers_share_the_cores_of_their_host() -> None:
    assert run(workers=4, hosts=1, cores=2.0).steps_per_s == pytest.approx(0.5)
    assert run(workers=4, hosts=1, cores=2.0, gpu=True).steps_per_s == pytest.approx(1.0)
    assert run(workers=4, hosts=2, cores=2.0, params=1000).steps_per_s == pytest.approx(1.0, rel=0.01)


def test_threads_of_a_server_are_its_share_of_the_cores() -> None:
    """Arithmetic of 100 ns per parameter: halved by two threads, but not by more, since memory limits it."""
    costs = replace(FREE, apply_ns={"sgd": 100.0}, parallel=2.0)
    seconds = {
        cores: 1 / run(workers=1, hosts=1, cores=cores, costs=costs).steps_per_s - 1 for cores in (1.0, 2.0, 8.0)
    }
    assert seconds == pytest.approx({1.0: 0.1, 2.0: 0.05, 8.0: 0.05})


def test_handing_gradients_over_takes_its_time() -> None:
    costs = replace(FREE, hand_ns=50.0, local_call_s=0.01, call_s=5.0)
    outcome = run(hosts=1, costs=costs)
    assert 1 / outcome.steps_per_s == pytest.approx(1.0 + 0.05 + 2 * 0.01)
    assert outcome.step_parts[Part.COPIES] == pytest.approx(0.05)


def test_gradients_leave_while_they_are_computed() -> None:
    """8 MB take 0.08 s on the link; the slice of 0.3 s hides all but the last chunks, unless slices have no names."""
    links = {"params": 2_000_000, "compute_s": 0.3, "workers": 1, "chunk_bytes": 1 << 17}
    hidden, behind, at_end = run(**links), run(**links, moves=False), run(**links, backward=0.0)
    assert at_end.steps_per_s == pytest.approx(behind.steps_per_s)
    assert 0.3 < 1 / hidden.steps_per_s < 0.32
    assert 0.38 < 1 / behind.steps_per_s < 0.40


BOUNDED = Consistency(Mode.ASYNC, 1)


def test_the_forward_pass_begins_while_weights_come() -> None:
    """Asynchronous: 0.08 s there hide behind the backward pass, and 0.08 s back behind the forward pass of 0.1 s."""
    links = {"params": 2_000_000, "compute_s": 0.3, "workers": 1, "chunk_bytes": 1 << 17, "consistency": BOUNDED}
    hidden, on_gpu, whole = run(**links), run(**links, gpu=True), run(**links, backward=0.0)
    assert 0.3 < 1 / hidden.slices_per_s < 0.32
    assert 0.38 < 1 / on_gpu.slices_per_s < 0.41
    assert 0.46 < 1 / whole.slices_per_s < 0.48
    assert hidden.waiting < 0.06


def test_a_forward_pass_shorter_than_the_weights_take_waits_for_the_last_ones() -> None:
    links = {"params": 2_000_000, "workers": 1, "chunk_bytes": 1 << 17, "consistency": BOUNDED}
    short = run(**links, compute_s=0.09, backward=2 / 3)
    assert 1 / short.slices_per_s == pytest.approx(0.08 + 0.08, rel=0.1)
    assert short.waiting == pytest.approx(1 - 0.09 / 0.16, rel=0.15)


def test_chunks_are_those_of_a_real_plan() -> None:
    """By the speed of the links between hosts, by the model alone on one; shares as the placement says."""
    job = Scenario(workers=4, servers=6, params=6_000_000, compute_s=1.0, bandwidth=1.25e7, with_server=True)
    plan = seating(job).plan
    assert plan.layout.chunk_bytes == link_chunk_bytes(24_000_000, 100.0)
    assert seating(replace(job, with_server=False, hosts=1)).plan.layout.chunk_bytes == 1 << 20
    split = seating(replace(job, placement="split")).plan
    # n = 4, k = 2: one alone takes 6 parts, one beside a worker 2.
    of_all = [sum(chunk.nbytes for chunk in split.chunks_of(server)) / 24e6 for server in range(6)]
    assert of_all == pytest.approx([0.3, 0.3, 0.1, 0.1, 0.1, 0.1], abs=0.011)


def test_servers_per_host_share_a_link() -> None:
    apart, together = (run(workers=4, servers=4, compute_s=1e-3, servers_per_host=n) for n in (1, 4))
    assert apart.steps_per_s > 2.5 * together.steps_per_s


@pytest.mark.parametrize("consistency", [Consistency(Mode.SYNC), Consistency(Mode.ASYNC, 1)], ids=str)
def test_shared_memory_needs_one_host(consistency: Consistency) -> None:
    with pytest.raises(ConfigError, match="add --hosts 1"):
        run(transport="shm", consistency=consistency)
