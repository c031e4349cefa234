"""Another number of servers: which chunks come from where, what is refused, and how a change ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.core.job.holders import Cover, Holders
from paramserver.core.layout.plan import Layout, TensorSpec, make_layout, make_plan
from paramserver.core.layout.replanning import plan_number, shard_number, sources
from paramserver.core.procedures.resizing import Facts, Resizing, Stage, refusal


def layout(tensors: int = 40, elements: int = 5000, chunk_bytes: int = 1024) -> Layout:
    return make_layout([TensorSpec(f"w{n}", (elements,), "float32") for n in range(tensors)], chunk_bytes)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.sampled_from((64, 1024, 65536)))
def test_each_chunk_comes_once_from_the_shard_that_has_it(before: int, after: int, tensors: int, size: int) -> None:
    laid_out = layout(tensors, 3000, size)
    former, plan = make_plan(laid_out, before), make_plan(laid_out, after)
    came: list[int] = []
    for shard in range(after):
        for source, chunks in sources(former, plan, shard).items():
            assert {former.owner[index] for index in chunks} == {source}
            assert {plan.owner[index] for index in chunks} == {shard}
            came += chunks
    assert sorted(came) == [chunk.index for chunk in laid_out.chunks]


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("servers", [3, 4, 5, 8])
def test_the_bytes_of_each_server_are_within_5_percent(servers: int, replicas: int) -> None:
    holders = Holders.spread(servers, Holders.plan(2, replicas))
    plan = make_plan(layout(), len(holders))
    sizes = [sum(chunk.nbytes for chunk in plan.chunks_of(shard)) for shard in range(len(holders))]
    held = [0] * servers
    for size, one in zip(sizes, holders.shards, strict=True):
        for server in (one.primary, *(backup.server for backup in one.backups)):
            held[server] += size
    assert max(held) <= 1.05 * min(held)


def test_shards_of_another_number_of_servers_have_all_backups_from_the_start() -> None:
    former = Holders.plan(2, 1)
    former.number, former.takeovers = 17, 3
    holders = Holders.spread(4, former)
    assert (holders.number, holders.takeovers, holders.replicas) == (18, 3, 1)
    assert {holders.state(shard) for shard in range(len(holders))} == {Cover.REPLICATED}
    assert holders.settled(range(4))


def test_the_numbers_of_shards_of_all_plans_differ() -> None:
    numbers = [shard_number(plan, shard) for plan in range(4) for shard in range(5)]
    assert len({*numbers}) == len(numbers)
    assert [plan_number(number) for number in numbers] == [plan for plan in range(4) for _ in range(5)]
    assert shard_number(0, 3) == 3


CALM = Facts(servers=3, replicas=1, most=4096)


@pytest.mark.parametrize(
    ("servers", "facts", "text"),
    [
        (0, CALM, "a job has 1 to 4096 servers, not 0"),
        (4097, CALM, "not 4097"),
        (1, CALM, "each part of the model is on 2 servers (cluster.replicas is 1), so 1 cannot hold it"),
        (4, Facts(3, 0, 9, busy="the mode changes"), "the mode changes just now: try again when that is done"),
        (4, Facts(3, 0, 9, leaves="server-1"), "server-1 was asked to leave: start it again first"),
        (4, Facts(3, 0, 9, missing="server-1"), "server-1 is not there: start it again first"),
        (4, Facts(3, 0, 9, split=True), "(cluster.placement), so their number is fixed"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(servers: int, facts: Facts, text: str) -> None:
    assert text in refusal(servers, facts)


def test_what_can_be_is_not_refused() -> None:
    assert not any(refusal(servers, CALM) for servers in (2, 3, 4, 4096))


@pytest.mark.parametrize("seed", range(30))
def test_a_change_is_done_or_undone_whenever_it_is_given_up_or_another_coordinator_comes(seed: int) -> None:
    """No number of a plan is used twice. What is in force changes at the end of a change only."""
    rng = random.Random(seed)
    state, used = Resizing(3), [0]
    for _ in range(60):
        in_force = state.servers, state.plan
        steps = {Stage.NONE: ["wish"], Stage.WAITS: ["prepare", "undo"], Stage.PREPARES: ["commit", "undo"]}
        step = rng.choice([*steps[state.stage], "takeover"])
        if step == "wish":
            wanted = rng.randint(1, 8)
            state.wish(wanted)
            assert state.seats == max(wanted, in_force[0])
        elif step == "prepare":
            used.append(state.prepare())
            assert state.settled == used[-1] - 1, "shards of this plan are not dropped while they are filled"
        elif step == "commit":
            wanted = state.wanted
            state.commit()
            assert (state.servers, state.plan) == (wanted, used[-1])
        elif step == "undo":
            state.undo()
        else:
            servers, plan, newest = state.servers, state.plan, state.newest_plan
            state = Resizing(1)
            state.restore(servers, plan, newest)
        if step != "commit":
            assert (state.servers, state.plan) == in_force
        if not state.under_way:
            assert (state.wanted, state.seats, state.settled) == (state.servers, state.servers, used[-1])
    assert used == sorted(set(used))
