"""ps.init is called once in a process that is a worker of a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paramserver import errors
from paramserver.local import entry


@pytest.mark.parametrize("closed", [False, True])
def test_a_second_worker_in_one_process_is_refused(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the first one for ever. After that one is closed, the job is looked for."""
    former: list[Any] = [SimpleNamespace(closed=closed)]
    monkeypatch.setattr(entry, "_contexts", former)

    def nobody(*_: object) -> None:
        raise errors.UnavailableError("nobody answers")

    monkeypatch.setattr(entry, "to_coordinator", nobody)
    wanted, text = (
        (errors.UnavailableError, "nobody answers")
        if closed
        else (errors.UserError, r"ps\.init\(\) was called before in this process")
    )
    with pytest.raises(wanted, match=text):
        entry.init(cluster__coordinator="127.0.0.1:1", log__level="error")
