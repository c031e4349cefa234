"""The cost of replicas: steps with a backup of each shard beside steps without, on one host and between hosts; memory.

On one host: `exchange` over shared memory with two servers. Between hosts: `step_ideal` with four servers and four
workers, whose links are slow enough for the processors of this machine. There the formula says 1 + 1/n for n workers on
the servers' links. The memory is that of all processes, in which shared pages count once. The additional memory of
replicas is compared with a further copy of each server's weights and optimizer state. All backups are whole before the
steps that count.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks import exchange, hosts, mem
from benchmarks.busy import Busy
from benchmarks.launch import SCRIPTS, call, flags
from benchmarks.rows import Row, rows
from tests.support.machines.network import Network

WITHOUT, WITH = "without", "replicas 1"
VARIANTS = {WITHOUT: 0, WITH: 1}
SERVERS, WORKERS, MEGABYTES, STEPS, SKIP = 2, 2, 256, 24, 12
# By optimizer: numbers that it keeps for each weight.
STATE = {"sgd": 0, "adamw": 2}
# Of the steps between hosts: (workers and servers, megabytes, megabits per second, steps, steps that do not count).
_LINKS = (4, 24, 100.0, 12, 6)
# At most, by kind.
TARGETS = {"exchange": 1.35, "step_ideal": 1.15}
Measured = tuple[list[float], float]


def run(repetitions: int) -> list[Row]:
    """All cases. Raises RuntimeError without root and iproute2, if a run fails, or if weights differ."""
    found: list[Row] = []
    for optimizer in STATE:
        measured = _in_turn("exchange", repetitions, lambda replicas, o=optimizer: on_one_host(o, replicas))  # type: ignore[misc]
        found += rows("replicas", f"exchange, {SERVERS} servers, {MEGABYTES} MiB, {optimizer}", measured, WITHOUT)
    for optimizer, numbers in STATE.items():
        totals = {variant: memory(optimizer, replicas) for variant, replicas in VARIANTS.items()}
        print(text(optimizer, totals[WITHOUT], totals[WITH], MEGABYTES * 2**20 * (1 + numbers)), file=sys.stderr)
    n, megabytes, megabits, *_ = _LINKS
    with hosts.network(n, n, megabits) as network:
        measured = _in_turn("step_ideal", repetitions, lambda replicas: between_hosts(network, replicas))
    return found + rows("replicas", f"step_ideal, {n} + {n}, {megabytes} MB, {megabits:g} Mb/s", measured, WITHOUT)


def _in_turn(kind: str, repetitions: int, measure: Callable[[int], Measured]) -> dict[str, list[float]]:
    """Seconds of the steps of both variants, which must make the same weights."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(repetitions):
        weights = set()
        for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
            busy = Busy()
            times, weight = measure(VARIANTS[variant])
            seconds[variant] += times
            weights.add(weight)
            used, stolen = busy.shares()
            said = ", ".join(f"{1000 * one:.0f}" for one in times)
            print(f"{kind}, {variant}: {said} ms; CPU {used:.0%}, stolen {stolen:.0%}", file=sys.stderr, flush=True)
        if len(weights) > 1:
            raise RuntimeError(f"{kind}: the weights differ: {weights}")
    ratio = median(seconds[WITH]) / median(seconds[WITHOUT])
    print(f"{kind}: {ratio:.2f} times the time without, wanted {TARGETS[kind]:g}", file=sys.stderr, flush=True)
    return seconds


def _command(optimizer: str, replicas: int, directory: str) -> list[str]:
    sizes = flags({"--servers": SERVERS, "--workers": WORKERS, "--replicas": replicas})
    script = flags({"--megabytes": MEGABYTES, "--ranks": WORKERS, "--steps": STEPS, "--optimizer": optimizer})
    run_ = [sys.executable, "-m", "paramserver", "run", str(SCRIPTS / "exchange.py"), "--set", "cluster.transport=shm"]
    return [*run_, *sizes, "--", *script, "--out", directory]


def on_one_host(optimizer: str, replicas: int) -> Measured:
    """Seconds of the steps that count, and a weight after the last step."""
    with tempfile.TemporaryDirectory() as directory:
        call(_command(optimizer, replicas, directory))
        found = [json.loads(path.read_text()) for path in Path(directory).glob("*.json")]
    if len(found) != WORKERS or len({one["weight"] for one in found}) != 1:
        raise RuntimeError(f"the workers' weights differ: {[one['weight'] for one in found]}")
    return exchange.steps_of(found, SKIP), found[0]["weight"]


def memory(optimizer: str, replicas: int) -> int:
    """Bytes of all processes together, at most."""
    with tempfile.TemporaryDirectory() as directory:
        return mem.watched(_command(optimizer, replicas, directory))[mem.TOTAL]


def text(optimizer: str, without: int, with_: int, copy: int) -> str:
    """A line for people; bytes of all processes, and of a further copy of weights and optimizer state."""
    return (
        f"memory, {optimizer}: {without / 1e9:.2f} GB without, {with_ / 1e9:.2f} GB with replicas 1: "
        f"{(with_ - without) / copy:.2f} further copies of weights and state"
    )


def between_hosts(network: Network, replicas: int) -> Measured:
    """The same between emulated hosts."""
    n, megabytes, _, steps, skip = _LINKS
    words = flags({"--megabytes": megabytes, "--ranks": n, "--steps": steps, "--skip": skip})
    found = hosts.cluster(network, n, n, words, settings={"cluster.replicas": str(replicas)})
    return found["step_s"], found["weight"]
