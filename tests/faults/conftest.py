"""Which cases are run, and where their results are kept."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.cases import Case, campaign, kills, kills_of_copies, matrix
from tests.support.faults.results import RESULTS, Results
from tests.support.faults.runs import Bench

# Name, default, and what it means.
OPTIONS: dict[str, tuple[Any, str]] = {
    "range": (":", "cases A to B (exclusive) of each test, as 0:40; all by default"),
    "only": ("", "only cases whose name this regular expression finds"),
    "again": (False, "also cases that have a good result already"),
    "seed": (1, "of the campaign"),
    "faults": (200, "of the campaign, in all"),
    "each": (4, "of the campaign, in one run"),
    "kinds": ("worker,server,coordinator,store,network,storage", "of the campaign"),
    "replicas": (0, "of the campaign"),
    "kills": (50, "of each role, or mode"),
    "seconds": (1e9, "begin no case after so many seconds"),
    "no-checkpoints": (False, "run without checkpoints"),
    "transport": ("auto", "of weights and gradients: cluster.transport of the runs with faults"),
    "results": (RESULTS, "the file of results"),
}
_BEGUN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults", "tests/faults")
    for name, (default, words) in OPTIONS.items():
        if default is False:
            group.addoption(f"--{name}", action="store_true", help=words)
        else:
            group.addoption(f"--{name}", default=default, type=type(default), help=words)


def option(config: pytest.Config, name: str) -> Any:
    """The default where this folder is not among those that pytest was started with."""
    return config.getoption(name.replace("-", "_"), OPTIONS[name][0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config, name = metafunc.config, metafunc.function.__name__
    if name == "test_campaign":
        each, kinds = option(config, "each"), tuple(option(config, "kinds").split(","))
        runs, replicas = -(-option(config, "faults") // each), option(config, "replicas")
        cases = campaign(option(config, "seed"), runs, each, kinds, replicas)
    elif name == "test_kills":
        runs = -(-option(config, "kills") // 10)
        cases = [case for role in ("worker", "server") for case in kills(role, runs, 10)]
    elif name == "test_kills_of_copies":
        runs = -(-option(config, "kills") // 10)
        cases = [case for mode in ("sync", "async") for case in kills_of_copies(mode, runs, 10)]
    else:
        cases = matrix()
    first, _, last = option(config, "range").partition(":")
    chosen = cases[int(first or 0) : int(last) if last else None]
    metafunc.parametrize("case", [_param(case) for case in chosen if re.search(option(config, "only"), case.name)])


def _param(case: Case) -> Any:
    # The run without faults may have to be made first.
    return pytest.param(case, id=case.name, marks=pytest.mark.timeout(2 * case.job.limit_s + 60.0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that have gone well are not run again."""
    if option(config, "again"):
        return
    good = Results(option(config, "results")).good()
    left_out = [item for item in items if isinstance(item, pytest.Function) and _is_of(item, good)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _is_of(item: pytest.Function, names: set[str]) -> bool:
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    return item.get_closest_marker("faults") is not None and isinstance(case, Case) and case.name in names


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if time.monotonic() - _BEGUN > option(item.config, "seconds"):
        item.session.shouldstop = "the seconds are over; the cases that are left have not been run"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing is left to run: that is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and Results(option(session.config, "results")).good():
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def bench(pytestconfig: pytest.Config) -> Bench:
    """Runs without faults are made once for all cases of the same job."""
    logs = Path(option(pytestconfig, "results")).parent / "logs"
    checkpoints, transport = not option(pytestconfig, "no-checkpoints"), option(pytestconfig, "transport")
    return Bench(logs, checkpoints=checkpoints, transport=transport)


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Results:
    return Results(option(pytestconfig, "results"))
