"""What `paramserver simulate` predicts, beside what `paramserver run` does with workers that sleep as long."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from paramserver.core.consistency import Consistency, Mode
from paramserver.simulate.calibrate import calibrate
from paramserver.simulate.cluster import simulate
from paramserver.simulate.costs import Costs
from paramserver.simulate.scenario import Scenario
from paramserver.simulate.stragglers import parse
from tests.integration.harness import SCRIPTS, Place, place_fixture

SLICE_S, WIDE = 0.25, 256
PARAMS = 64 * WIDE + WIDE + 10 * WIDE + 10
# This part of the versions, at either end, is left aside: processes start, and run out of slices.
EDGE = 0.15
WITHIN = 0.15

SYNC = Consistency(Mode.SYNC)
CASES = {
    "sync, 2 workers, exp:0.3": (SYNC, 2, 2, "exp:0.3", 24),
    "sync, 4 workers, 16 slices, slow:1x3": (SYNC, 4, 16, "slow:1x3", 10),
    "async, 3 workers, staleness 1, exp:1": (Consistency(Mode.ASYNC, 1), 3, 3, "exp:1", 24),
    "async, 4 workers, unbounded, slow:1x2": (Consistency(Mode.ASYNC), 4, 4, "slow:1x2", 24),
}


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


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_real_run_is_as_fast_as_predicted(place: Place, costs: Costs, case: str) -> None:
    consistency, workers, slices, straggler, steps = CASES[case]
    out = place.work / "seen.json"
    mode = ["--mode", consistency.mode.value]
    if consistency.mode is Mode.ASYNC:
        mode += ["--staleness", "unbounded" if consistency.staleness is None else str(consistency.staleness)]
    sizes = ["--workers", str(workers), "--slices-per-step", str(slices)]
    sleeps = ["--slices", str(slices * steps), "--slice-s", str(SLICE_S), "--straggler", straggler]
    place.paramserver("run", SCRIPTS / "sleeping.py", *sizes, *mode, "--", *sleeps, "--out", out).check()
    found = json.loads(out.read_text())
    real = per_second({int(version): at for version, at in found["seen"].items()})
    _, record = simulate(
        Scenario(
            workers=workers,
            servers=1,
            params=PARAMS,
            compute_s=found["compute_s"],
            bandwidth=1.25e9,
            consistency=consistency,
            slices=slices,
            stragglers=(parse(straggler),),
            steps=steps,
            costs=costs,
        )
    )
    predicted = per_second(dict(enumerate([0.0, *record.published_at])))
    off = f"predicted {predicted:.2f} ({predicted / real - 1:+.1%})"
    print(f"{case}: a slice {found['compute_s']:.4f} s; {real:.2f} versions/s, {off}")
    assert predicted == pytest.approx(real, rel=WITHIN)


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
