"""The kernels are compiled, or not, and what is made of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hatch_build import compile_kernels
from paramserver.kernels import library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")


def test_a_library_of_another_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    assert library.load() == "not built: there was no C compiler when paramserver was installed"
    source = tmp_path / "kernels.c"
    source.write_bytes(library.SOURCE.read_bytes() + b"\n")
    made = tmp_path / "_kernels.so"
    assert compile_kernels(source, made) == ""
    monkeypatch.setattr(library, "LIBRARY", made)
    assert library.load() == "built from another version of paramserver"
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "LIBRARY", broken)
    assert str(library.load()).startswith("cannot be loaded: ")


def test_without_a_compiler_there_is_no_library_and_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "_kernels.so"
    made.write_bytes(b"from before")
    monkeypatch.setenv("CC", "no-such-compiler-here")
    assert "no-such-compiler-here" in compile_kernels(library.SOURCE, made)
    assert not made.exists()
    monkeypatch.delenv("CC")
    bad = tmp_path / "kernels.c"
    bad.write_text("this is no C")
    assert "error" in compile_kernels(bad, made)
    assert list(tmp_path.glob("_kernels*")) == []
