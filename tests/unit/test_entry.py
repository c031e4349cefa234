"""ps.init is called once in a process that is a worker of a cluster."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest

from paramserver import api as entry
from paramserver import errors
from paramserver.processes.environment import ENV_INDEX


@pytest.mark.parametrize(
    ("closed", "launched", "wanted", "text"),
    [
        (False, False, errors.UserError, r"ps\.init\(\) was called before in this process"),
        (True, False, errors.UnavailableError, "nobody answers"),
        (True, True, errors.UserError, r"called again after ctx\.close\(\): a job is one training"),
    ],
)
def test_a_second_worker_in_one_process_is_refused(
    closed: bool, launched: bool, wanted: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the first one for ever. After that one is closed, another job is looked for."""
    if launched:
        monkeypatch.setenv(ENV_INDEX, "0")
    former: list[Any] = [SimpleNamespace(closed=closed)]
    monkeypatch.setattr(entry, "_contexts", former)

    def nobody(*_: object) -> None:
        raise errors.UnavailableError("nobody answers")

    monkeypatch.setattr(entry, "to_coordinator", nobody)
    with pytest.raises(wanted, match=text):
        entry.init(cluster__coordinator="127.0.0.1:1", log__level="error")


class Open:
    """A context that ends the process when it is closed."""

    def close(self) -> None:
        raise SystemExit(3)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_closes_nothing_of_the_script() -> None:
    """A process that loads data runs the functions for the end of Python, too."""
    opened: Any = Open()
    entry._contexts.append(opened)
    try:
        with pytest.raises(SystemExit):
            entry.close_all()
        child = multiprocessing.get_context("fork").Process(target=entry.close_all)
        child.start()
        child.join(30)
        assert child.exitcode == 0
    finally:
        entry._contexts.remove(opened)
