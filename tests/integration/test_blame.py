"""Causes injected one at a time into real runs: the right worker or server is named, with the right cause.

`make test` has no run of it; `tests/cluster/test_blame.py` shows two causes in one process.
"""

from __future__ import annotations

import pytest

from benchmarks.blame import CAUSES, MODES, Injected, watch


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("injected", CAUSES, ids=lambda injected: injected.name)
def test_the_right_member_is_named_with_the_right_cause(injected: Injected, mode: str) -> None:
    found = watch(injected, mode)
    assert found.right(injected), found


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(10))
def test_healthy_runs_name_nobody(mode: str, number: int) -> None:
    found = watch(None, mode)
    assert found.right(None), found
