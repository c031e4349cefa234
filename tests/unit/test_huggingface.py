"""Which checkpoint of the Trainer a restart goes on from; the real Trainer is in tests/frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.frameworks.huggingface import begin, last_checkpoint


def checkpoint(directory: Path, name: str, *files: str) -> str:
    (directory / name).mkdir()
    for file in files:
        (directory / name / file).touch()
    return str(directory / name)


def test_the_newest_checkpoint_that_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert last_checkpoint(tmp_path) is None
    states = ("rng_state_0.pth", "rng_state_1.pth")
    complete = checkpoint(tmp_path, "checkpoint-90", "trainer_state.json", *states)
    checkpoint(tmp_path, "checkpoint-100", *states)  # killed before the state was written
    checkpoint(tmp_path, "checkpoint-110", "trainer_state.json", states[0])  # rank 1 had not saved
    checkpoint(tmp_path, "checkpoint-best", "trainer_state.json", *states)
    assert last_checkpoint(tmp_path) == complete
    newer = checkpoint(tmp_path, "checkpoint-1000", "trainer_state.json", *states)
    assert last_checkpoint(tmp_path) == newer


def test_a_script_alone_has_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert not begin()
    complete = checkpoint(tmp_path, "checkpoint-3", "trainer_state.json", "rng_state.pth")
    assert last_checkpoint(tmp_path) == complete
