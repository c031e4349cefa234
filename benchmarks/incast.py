"""Eight workers push to one server at once through a link with a small queue: time per step over what the link allows.

The queue, at either end of each cable, is as large as that of a switch's port. The output has the number of segments
that TCP had to send again. A timeout of TCP takes 200 ms, which is as long as a quarter of these steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import hosts
from benchmarks.launch import flags
from benchmarks.rows import Row, rows
from benchmarks.step_ideal import OURS, server_bound

WORKERS, MEGABYTES, MEGABITS, STEPS, SKIP = 8, 4, 200.0, 12, 2
QUEUES_KB = (64, 256, 2048)
BOUND, IN_TURN = "push and pull at once", "push, then pull"


def run(repetitions: int) -> list[Row]:
    """All queues. Raises RuntimeError without root and iproute2, or if a run fails."""
    return [row for queue in QUEUES_KB for row in measure(queue, repetitions)]


def measure(queue_kilobytes: int, repetitions: int) -> list[Row]:
    """One size of the queue."""
    case = f"{WORKERS} + 1, {MEGABYTES} MB, {MEGABITS:g} Mb/s, {queue_kilobytes} kB queue"
    words = flags({"--megabytes": MEGABYTES, "--ranks": WORKERS, "--steps": STEPS, "--skip": SKIP})
    seconds: list[float] = []
    with hosts.network(WORKERS, 1, MEGABITS, queue_kilobytes) as network:
        rate = network.megabits_per_s("w0", "s0", 20)
        for _ in range(repetitions):
            before = hosts.retransmitted(network)
            found = hosts.cluster(network, WORKERS, 1, words)
            seconds += found["step_s"]
            again = hosts.retransmitted(network) - before
            print(f"{case}: {_said(found['step_s'])} s; sent again: {again}", file=sys.stderr, flush=True)
        how = hosts.congestion_control(network)
    print(f"{case}: TCP ({how}) alone reaches {rate:.0f} Mb/s", file=sys.stderr)
    bound = server_bound(MEGABYTES * 1e6, WORKERS, 1, rate * 1e6 / 8)
    return rows("incast", case, {OURS: seconds, BOUND: [bound], IN_TURN: [2 * bound]}, OURS)


def _said(seconds: Sequence[float]) -> str:
    return ", ".join(f"{one:.2f}" for one in seconds)
