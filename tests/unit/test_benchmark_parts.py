"""The parts of benchmarks that are arithmetic: bounds, sizes, what the system says of processes."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import agg, apply, busy, charlm, compress, ctrl, mem, shards, start, step_ideal, train, wire_bw
from benchmarks.counting import STEPS, Counts
from benchmarks.counts import lines
from benchmarks.launch import flags
from benchmarks.wire.peer import MESSAGE_BYTES, sizes
from paramserver.compress.registry import push_compressor

GIGABIT = 1e9 / 8


@pytest.mark.parametrize(
    ("workers", "servers", "at_servers", "ring", "split"),
    [(8, 8, 0.82, 1.43, 0.82), (8, 2, 3.26, 1.43, 1.20), (8, 1, 6.53, 1.43, 1.31), (4, 4, 0.82, 1.22, 0.82)],
)
def test_bounds_of_a_step_of_102_megabytes_at_a_gigabit(
    workers: int, servers: int, at_servers: float, ring: float, split: float
) -> None:
    """The second figures are those that BytePS gives for ResNet-50."""
    assert step_ideal.server_bound(102e6, workers, servers, GIGABIT) == pytest.approx(at_servers, abs=0.01)
    assert step_ideal.ring_bound(102e6, workers, GIGABIT) == pytest.approx(ring, abs=0.01)
    assert step_ideal.split_bound(102e6, workers, servers, GIGABIT) == pytest.approx(split, abs=0.01)


def test_more_servers_than_workers_gain_nothing() -> None:
    assert step_ideal.server_bound(1e9, 2, 4, 1e9) == step_ideal.server_bound(1e9, 2, 2, 1e9) == 1.0
    assert step_ideal.split_bound(1e9, 2, 4, 1e9) == step_ideal.split_bound(1e9, 2, 2, 1e9)


def test_compression_pays_below_the_bandwidth_at_which_both_take_as_long() -> None:
    """Of 8 MB a quarter is left; encoding and decoding take 10 ms: so long do 6 MB take at 600 MB/s."""
    cost = compress.Cost([0.009, 0.007, 0.005], [0.003], 8_000_000, 2_000_000, 0.01)
    assert cost.break_even == pytest.approx(600e6)
    sooner = 2e6 / 500e6 + 0.010 < 8e6 / 500e6
    later = 2e6 / 700e6 + 0.010 > 8e6 / 700e6
    assert sooner
    assert later


def test_the_encoders_say_what_is_read() -> None:
    """Gradients of the first steps, as the benchmark has them; top-k keeps one number in a hundred."""
    costs: dict[str, compress.Cost] = {}
    for name in compress.PUSHES:
        compressor = push_compressor(name)
        assert compressor is not None
        compress.measure(compressor, [torch.arange(-800.0, 800.0)], costs)
    assert {name: round(cost.before / cost.after, 1) for name, cost in costs.items()} == {
        "bf16": 2.0,
        "fp16": 2.0,
        "int8": 3.8,
        "topk": 33.3,
    }
    assert costs["fp16"].error < costs["bf16"].error < costs["int8"].error < costs["topk"].error < 1


def test_a_payload_is_sent_in_messages_of_four_mebibytes() -> None:
    assert sizes(64 << 10) == [64 << 10]
    assert sizes(2 * MESSAGE_BYTES + 4) == [MESSAGE_BYTES, MESSAGE_BYTES, 4]


def test_how_much_is_moved_at_once() -> None:
    assert [wire_bw.payloads(size) for size in (64 << 10, 4 << 20, 64 << 20)] == [64, 16, 4]
    assert wire_bw.gigabytes(3 * 10**9, 2.0) == 1.5


def test_processors_are_used_stolen_or_idle() -> None:
    text = "cpu  100 1 20 700 79 3 7 90 50 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"
    assert busy.parse(text) == (131, 90, 1000)


def test_processes_below_one() -> None:
    parents = {2: 1, 3: 2, 4: 2, 5: 4, 6: 1, 7: 6}
    assert sorted(mem.descendants(2, parents)) == [3, 4, 5]
    assert mem.descendants(7, parents) == []


def test_memory_that_is_shared_counts_in_part() -> None:
    assert mem.resident("00-ff ---p [rollup]\nRss:  900 kB\nPss:  512 kB\nPss_Dirty:  1 kB\n") == 512 * 1024


def test_memory_that_a_training_needs() -> None:
    """A server: two versions of the weights, two numbers of state, two inboxes. A worker: weights and gradients."""
    assert mem.needs(400, workers=2) == {"server": 2400, "worker": 800}
    assert mem.text("server", 3 * 10**9, 2 * 10**9) == "server: 3.00 GB, 1.50 × 2.00 GB"


def test_losses_agree_but_for_the_order_of_sums() -> None:
    assert train.agree(2.5, 2.5001)
    assert not train.agree(2.5, 2.51)
    assert not train.agree(math.nan, math.nan)


def test_the_script_is_told_its_sizes() -> None:
    assert flags({"--batch": 4, "--slice-s": 0.5}) == ["--batch", "4", "--slice-s", "0.5"]


@pytest.mark.parametrize("measure", [ctrl.sync, ctrl.bounded, ctrl.membership])
def test_simulated_workers_get_through(measure: object) -> None:
    """Each raises if a worker is not answered as it should be."""
    assert callable(measure)
    assert 0 < measure(7, 3) < 1


def test_what_is_counted_is_said_per_worker_step() -> None:
    counts = Counts(servers=2, workers=3, model_bytes=100, encoded=40, pushed_bytes=3300, copied_bytes=2000)
    counts.calls["Shard.Push"] = 6 * STEPS
    assert lines(counts) == [
        "3 workers, 2 servers",
        "  Shard.Push: 1 per worker-step and server",
        "  calls to the coordinator: 0",
        "  operations on the store: 0",
        "  frames encoded per version and server: 2",
        "  bytes sent per byte of gradient: 1.1000",
        "  copies of each byte by torch, per worker-step: 2.0000",
    ]


@pytest.mark.parametrize("name", shards.STATE_BYTES)
def test_every_way_to_update_ends_at_the_same_weights(name: str) -> None:
    seconds = apply.compare(name, elements=4800, repetitions=2, unfused=True)
    assert {len(times) for times in seconds.values()} == {2}
    assert len(seconds) == 6


@pytest.mark.parametrize("count", [2, 5])
def test_every_way_to_sum_ends_at_the_same_weights(count: int) -> None:
    assert set(agg.compare(count, elements=4800, repetitions=1)) == {agg.OURS, agg.PLAIN, agg.TREE, agg.FLOOR}


def test_weights_that_differ_are_noticed() -> None:
    with pytest.raises(RuntimeError, match=r"other: the weights differ by 0\.1"):
        apply.check(torch.ones(3), {"other": torch.tensor([1.0, 1.1, 1.0])})


def test_a_restart_ends_with_the_longest_pause_after_the_kill() -> None:
    """A step that was under way may still end after the kill."""
    assert start.back_at([0.0, 5.0, 5.1, 5.2, 5.21, 5.6, 5.7], killed_at=5.205) == 5.6
    with pytest.raises(ValueError, match="no step has followed"):
        start.back_at([1.0, 2.0], killed_at=3.0)


def test_the_loss_that_a_run_printed_last_and_the_gap_to_the_first_mode() -> None:
    assert charlm.last_loss("epoch 1: validation loss 3.250 nats per byte\nepoch 2: validation loss 2.500 nats") == 2.5
    with pytest.raises(RuntimeError, match="printed no validation loss"):
        charlm.last_loss("nothing")
    lines = charlm.gaps({"sync": [2.0, 4.0], "async": [3.5, 3.25]}).splitlines()
    assert lines[2:] == ["| sync | 3.000 | 2.000 and 4.000 | +0.000 |", "| async | 3.375 | 3.250 and 3.500 | +0.375 |"]
