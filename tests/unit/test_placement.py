"""How much of the model each server takes: the cost model, and the plan that comes of it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.core.layout.placement import Load, Seat, choose, load_of, split_shares
from paramserver.core.layout.plan import Kind, Layout, TensorSpec, make_layout, make_plan

MIB = 2**20


def seats(alone: int, beside: int) -> list[Seat]:
    """Each server on a host of its own."""
    return [*(Seat(f"s{i}") for i in range(alone)), *(Seat(f"w{i}", True) for i in range(beside))]


def model(chunks: int, chunk_bytes: int = 1024) -> Layout:
    """One tensor of so many equal chunks."""
    return make_layout([TensorSpec("w", (chunks * chunk_bytes // 4,), "float32")], chunk_bytes)


@pytest.mark.parametrize(("workers", "alone"), [(2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (32, 31), (5, 0)])
def test_shares_are_those_of_the_cost_model(workers: int, alone: int) -> None:
    """BytePS: with all workers' hosts holding shards, see docs/performance.md."""
    n, k = workers, alone
    shares = split_shares(seats(k, n), n)
    whole = n * n + k * n - 2 * k
    wanted = [Fraction(2 * (n - 1), whole)] * k + [Fraction(n - k, whole)] * n
    assert [Fraction(share, sum(shares)) for share in shares] == wanted


@pytest.mark.parametrize(("workers", "alone"), [(4, 1), (4, 2), (8, 2), (8, 4), (16, 4)])
def test_the_busiest_link_carries_what_the_cost_model_says(workers: int, alone: int) -> None:
    n, k = workers, alone
    layout, servers = model(4096, 64), seats(k, n)

    load = load_of(make_plan(layout, len(servers), split_shares(servers, n)), servers, n)
    assert load.at_once / layout.nbytes == pytest.approx(2 * n * (n - 1) / (n * n + k * n - 2 * k), rel=0.01)
    evenly = load_of(make_plan(layout, len(servers)), servers, n)
    assert load.at_once < evenly.at_once
    assert load.in_turn > evenly.in_turn


def test_links_of_servers_alone_and_of_workers() -> None:
    """By hand: 4 workers, chunks of 1 KiB."""
    layout, kib = model(8), 1024

    def load(servers: list[Seat]) -> Load:
        return load_of(make_plan(layout, len(servers)), servers, 4)

    assert load(seats(2, 0)) == Load(4 * 4 * kib, 2 * 4 * 4 * kib)
    assert load(seats(8, 0)) == Load(8 * kib, 2 * 8 * kib)
    # Each beside a worker has 2 chunks: that worker pushes the other 6, and 3 others pull those 2.
    assert load(seats(0, 4)) == Load(12 * kib, 2 * 6 * kib)
    # One host with two servers has one link.
    assert load([Seat("s"), Seat("s")]) == Load(4 * 8 * kib, 2 * 4 * 8 * kib)


def test_frozen_tensors_do_not_count() -> None:
    tensors = [TensorSpec("w", (1024,), "float32"), TensorSpec("f", (65536,), "float32", Kind.FROZEN)]
    layout = make_layout(tensors, 1024)
    assert load_of(make_plan(layout, 2), seats(2, 0), 2) == Load(4096, 8192)


def test_servers_of_one_host_share_its_part() -> None:
    doubled = [Seat("s"), Seat("s"), *seats(0, 4)]
    single = split_shares(seats(1, 4), 4)
    shares = split_shares(doubled, 4)
    assert Fraction(shares[0] + shares[1], sum(shares)) == Fraction(single[0], sum(single))
    assert shares[0] == shares[1]


def test_a_single_worker_keeps_all_beside_it_and_many_servers_need_no_help() -> None:
    assert split_shares(seats(1, 1), 1) == (0, 1)
    assert split_shares(seats(4, 4), 4) == (1, 1, 1, 1, 0, 0, 0, 0)


def test_what_has_less_to_carry_is_chosen() -> None:
    """Servers beside all workers: evenly, as pushes and pulls take turns in part. Beside a few: by their shares."""
    layout = model(60)
    for servers, workers, split in ((seats(2, 8), 8, False), (seats(7, 1), 8, True), (seats(8, 8), 8, True)):
        shares = split_shares(servers, workers)
        assert choose("auto", lambda: layout, servers, workers) == (shares if split else ())
        assert choose("split", lambda: layout, servers, workers) == shares
        assert choose("balanced", lambda: layout, servers, workers) == ()
    assert choose("auto", lambda: layout, seats(2, 0), 8) == ()


def test_a_split_needs_servers_beside_workers() -> None:
    with pytest.raises(ValueError, match="--with-server"):
        choose("split", lambda: model(4), seats(2, 0), 8)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 40), st.integers(1, 200))
def test_any_cluster_can_be_split(workers: int, alone: int, beside: int, chunks: int) -> None:
    """And what is chosen is never worse than an even spread."""
    layout, servers = model(chunks, 64), seats(alone, beside)

    def carried(shares: tuple[int, ...]) -> int:
        return load_of(make_plan(layout, len(servers), shares), servers, workers).both

    assert carried(choose("auto", lambda: layout, servers, workers)) <= carried(())
