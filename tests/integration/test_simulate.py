"""What `paramserver simulate` predicts, beside what `paramserver run` does with workers that sleep as long."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from benchmarks import hosts
from benchmarks.launch import flags
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.simulate.calibrate import calibrate
from paramserver.simulate.cluster import simulate
from paramserver.simulate.costs import Costs
from paramserver.simulate.parts.stragglers import parse
from paramserver.simulate.scenario import Scenario
from tests.support.integration.harness import SCRIPTS, Place, place_fixture

FEATURES, CLASSES, SMALL = 64, 10, 256
# This part of the versions, at either end, is left aside: processes start, and run out of slices.
EDGE = 0.15
WITHIN = 0.15

SYNC = Consistency(Mode.SYNC)


@dataclass(frozen=True, slots=True)
class Case:
    """A job on this machine. ``wide``: units of the model's hidden layer; each has 75 parameters."""

    consistency: Consistency
    workers: int
    slices: int
    straggler: str
    steps: int
    wide: int = SMALL
    slice_s: float = 0.25
    transport: str = "auto"

    @property
    def params(self) -> int:
        return (FEATURES + 1 + CLASSES) * self.wide + CLASSES


CASES = {
    "sync, 2 workers, exp:0.3": Case(SYNC, 2, 2, "exp:0.3", 24),
    "sync, 4 workers, 16 slices, slow:1x3": Case(SYNC, 4, 16, "slow:1x3", 10),
    "async, 3 workers, staleness 1, exp:1": Case(Consistency(Mode.ASYNC, 1), 3, 3, "exp:1", 24),
    "async, 4 workers, unbounded, slow:1x2": Case(Consistency(Mode.ASYNC), 4, 4, "slow:1x2", 24),
    "sync, 2 workers, small, shm": Case(SYNC, 2, 2, "exp:0.3", 60, slice_s=0.05),
    "sync, 2 workers, small, grpc": Case(SYNC, 2, 2, "exp:0.3", 60, slice_s=0.05, transport="grpc"),
    "sync, 2 workers, 2.5 M, shm": Case(SYNC, 2, 2, "exp:0.3", 40, 33_333, 0.05),
    "sync, 2 workers, 10 M, shm": Case(SYNC, 2, 2, "exp:0.3", 30, 133_333, 0.05),
    "async, 2 workers, staleness 1, 2.5 M, shm": Case(Consistency(Mode.ASYNC, 1), 2, 2, "exp:0.3", 30, 33_333, 0.05),
    "sync, 2 workers, 2.5 M, grpc": Case(SYNC, 2, 2, "exp:0.3", 30, 33_333, 0.05, "grpc"),
    "sync, 2 workers, 10 M, grpc": Case(SYNC, 2, 2, "exp:0.3", 24, 133_333, 0.05, "grpc"),
}


@dataclass(frozen=True, slots=True)
class Apart:
    """A job on emulated hosts, which does nothing but communicate. ``beside``: with a server beside each worker."""

    workers: int
    alone: int
    megabytes: int
    megabits: float
    beside: bool = False


# docs/simulate.md names the cases that cannot be predicted here: queues that overflow, and links so fast that the two
# cores of all emulated hosts decide.
APART = {
    "4 + 4, 24 MB, 100 Mb/s": Apart(4, 4, 24, 100.0),
    "8 + 2 and 8 beside workers, 12 MB, 50 Mb/s": Apart(8, 2, 12, 50.0, beside=True),
}
STEPS, SKIPPED = 10, 2


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.fixture(scope="module")
def costs() -> Costs:
    return calibrate()


def per_second(at: dict[int, float]) -> float:
    """Versions per second, the edges aside."""
    versions = sorted(at)
    first, last = versions[int(EDGE * len(versions))], versions[int((1 - EDGE) * len(versions)) - 1]
    return (last - first) / (at[last] - at[first])


def close(case: str, real: float, predicted: float, unit: str) -> None:
    print(f"{case}: {real:.2f} {unit}, predicted {predicted:.2f} ({predicted / real - 1:+.1%})")
    assert predicted == pytest.approx(real, rel=WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_real_run_is_as_fast_as_predicted(place: Place, costs: Costs, name: str) -> None:
    case = CASES[name]
    out = place.work / "seen.json"
    mode = ["--mode", case.consistency.mode.value, "--set", f"cluster.transport={case.transport}"]
    if case.consistency.mode is Mode.ASYNC:
        mode += ["--staleness", "unbounded" if case.consistency.staleness is None else str(case.consistency.staleness)]
    sizes = ["--workers", str(case.workers), "--slices-per-step", str(case.slices)]
    sleeps = ["--slices", str(case.slices * case.steps), "--slice-s", str(case.slice_s), "--straggler", case.straggler]
    words: list[str | Path] = [*sizes, *mode, "--", *sleeps, "--wide", str(case.wide), "--out", out]
    place.paramserver("run", SCRIPTS / "sleeping.py", *words).check()
    found = json.loads(out.read_text())
    real = per_second({int(version): at for version, at in found["seen"].items()})
    _, record = simulate(
        Scenario(
            workers=case.workers,
            servers=1,
            params=case.params,
            compute_s=found["compute_s"],
            bandwidth=1.25e9,
            consistency=case.consistency,
            slices=case.slices,
            stragglers=(parse(case.straggler),),
            steps=case.steps,
            hosts=1,
            transport=case.transport,
            cores=len(os.sched_getaffinity(0)),
            gpu=True,  # nearly all of a slice is sleep, and the backward pass is what comes after it
            backward=0.0,
            costs=costs,
        )
    )
    close(name, real, per_second(dict(enumerate([0.0, *record.published_at]))), "versions/s")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="emulated hosts are network namespaces, which only root can make")
@pytest.mark.parametrize("name", APART)
def test_a_step_between_hosts_takes_as_long_as_predicted(name: str) -> None:
    """Both directions at once, with the costs that there are without a calibration."""
    case = APART[name]
    words = flags({"--megabytes": case.megabytes, "--ranks": case.workers, "--steps": STEPS, "--skip": SKIPPED})
    with hosts.network(case.workers, case.alone, case.megabits) as network:
        megabits = network.megabits_per_s("w0", "w1", round(case.megabits / 10))
        took = hosts.cluster(network, case.workers, case.alone, words, case.beside)["step_s"]
    outcome, _ = simulate(
        Scenario(
            workers=case.workers,
            servers=case.alone + case.beside * case.workers,
            params=case.megabytes * 250_000,
            compute_s=1e-3,
            bandwidth=megabits * 1e6 / 8,
            with_server=case.beside,
            link_mbps=case.megabits,
            transport="grpc",
            steps=40,
        )
    )
    close(name, median(took), 1 / outcome.steps_per_s, "s per step")


@pytest.mark.long
def test_a_calibration_measures_something_on_every_path(place: Place) -> None:
    """It measures between processes, shows what it found, keeps it where it is told to, and simulates with it."""
    path = place.work / "costs.json"
    job = ["--params", "1M", "--compute", "10ms", "--steps", "20"]
    done = place.paramserver("simulate", "--calibrate", "--out", path, *job).check()
    found = json.loads(path.read_text())
    print(done.out)
    assert 0 < found["serve_s"] <= found["call_s"] < 1
    assert all(1e6 < found[name] < 1e12 for name in ("push_bytes_s", "pull_bytes_s"))
    assert all(0.01 < ns < 1000 for ns in (found["sum_ns"], *found["apply_ns"].values()))
    assert "what limits" in done.out
