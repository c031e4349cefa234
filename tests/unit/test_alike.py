"""Workers whose script, modules or arguments are not those of the first worker are refused, by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import structlog

from paramserver import errors
from paramserver.worker import alike


class Coordinator:
    """The first number for a place counts."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], float] = {}
        self.names: list[str] = []

    def agree_all(self, name: str, place: tuple[int, int], value: float) -> Mapping[tuple[int, int], float]:
        self.names.append(name)
        self.numbers.setdefault(place, value)
        return dict(self.numbers)


class Worker:
    """A worker's script, with a module beside it, one of a package that is installed there, and its arguments."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.script, self.module = place / "train.py", place / "nets" / "net.py"
        self.installed = place / "site-packages" / "lib.py"
        for file in (self.script, self.module, self.installed):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x = 1\n")
        main = ModuleType("__main__")
        main.__file__ = str(self.script)
        monkeypatch.setitem(sys.modules, "__main__", main)
        for name, file in (("nets.net", self.module), ("lib", self.installed)):
            module = ModuleType(name)
            module.__file__ = str(file)
            monkeypatch.setitem(sys.modules, name, module)

    def joins(self, coordinator: Coordinator, *arguments: str, chosen: str = "all") -> None:
        self._monkeypatch.setattr(sys, "argv", [str(self.script), *arguments])
        alike.compare(coordinator, "1a", chosen)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(tmp_path, monkeypatch)


def test_a_worker_that_runs_the_same_asks_once(worker: Worker) -> None:
    coordinator = Coordinator()
    worker.joins(coordinator, "--lr", "0.1")
    assert set(coordinator.names) == {"of run 1a script"}
    asked = len(coordinator.names)
    worker.joins(coordinator, "--lr", "0.1")
    assert len(coordinator.names) == asked + 1


@pytest.mark.parametrize("file", ["train.py", "nets/net.py"])
def test_a_file_that_was_edited_is_named(worker: Worker, file: str) -> None:
    coordinator = Coordinator()
    worker.joins(coordinator)
    (worker.script.parent / file).write_text("x = 2\n")
    with pytest.raises(errors.UserError, match=rf"^{file} of this worker's script is not that .*--resume.*same_script"):
        worker.joins(coordinator)


def test_a_script_of_another_name_is_the_script(worker: Worker) -> None:
    coordinator = Coordinator()
    worker.joins(coordinator)
    worker.script = worker.script.rename(worker.script.with_name("again.py"))
    sys.modules["__main__"].__file__ = str(worker.script)
    worker.joins(coordinator)
    worker.script.write_text("x = 2\n")
    with pytest.raises(errors.UserError, match=r"^again\.py of this"):
        worker.joins(coordinator)


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (["--lr", "0.1"], ["--lr", "0.2"], "argument --lr"),
        (["--lr=0.1"], ["--lr=0.2"], "argument --lr"),
        (["--token", "hush"], ["--token", "mum"], "argument --token"),
        (["-phush"], ["-pmum"], "argument -p"),
        (["a.csv", "b.csv"], ["a.csv", "c.csv"], "argument 2"),
        (["--amp"], ["--fast"], "the list of options"),
        (["--amp"], ["--amp", "--fast"], "the list of options"),
        (["--x", "1", "--x", "2"], ["--x", "1", "--x", "3"], r"argument --x \(2\)"),
    ],
)
def test_an_argument_that_differs_is_named_without_its_value(
    worker: Worker, first: list[str], second: list[str], name: str
) -> None:
    coordinator = Coordinator()
    worker.joins(coordinator, *first)
    with pytest.raises(errors.UserError, match=rf"^{name} of this worker's script is not that") as refused:
        worker.joins(coordinator, *second)
    assert not any(word in str(refused.value) for word in ("hush", "mum", "c.csv", "0.2"))


def test_what_only_one_worker_has_imported_and_what_is_installed_may_differ(worker: Worker) -> None:
    coordinator = Coordinator()
    worker.joins(coordinator)
    worker.installed.write_text("x = 2\n")
    del sys.modules["nets.net"]
    worker.joins(coordinator)


def test_the_folder_of_the_script_may_be_another_one(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator()
    worker.joins(coordinator, str(worker.script.parent / "a.csv"))
    Worker(tmp_path / "elsewhere", monkeypatch).joins(coordinator, str(tmp_path / "elsewhere" / "a.csv"))


@pytest.mark.parametrize(("chosen", "file"), [("files", False), ("none", True), ("none", False)])
def test_a_difference_that_is_meant_is_a_warning(worker: Worker, chosen: str, file: bool) -> None:
    coordinator = Coordinator()
    worker.joins(coordinator, "--data", "/mnt/a", chosen=chosen)
    if file:
        worker.script.write_text("x = 2\n")
    with structlog.testing.capture_logs() as said:
        worker.joins(coordinator, "--data", "/mnt/b", chosen=chosen)
    (only,) = said
    assert only["event"].startswith("train.py of this" if file else "argument --data of this")


def test_files_are_compared_where_arguments_may_differ(worker: Worker) -> None:
    coordinator = Coordinator()
    worker.joins(coordinator, "--data", "/mnt/a", chosen="files")
    worker.module.write_text("x = 2\n")
    with pytest.raises(errors.UserError, match=r"^nets/net\.py of this"):
        worker.joins(coordinator, "--data", "/mnt/b", chosen="files")


def test_a_notebook_has_no_script(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator()
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    worker.joins(coordinator)
    assert not coordinator.names
