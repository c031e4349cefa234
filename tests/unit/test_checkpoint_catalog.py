"""Which checkpoint is taken, which are passed over and why, and which may go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file

from paramserver.checkpoint.catalog import (
    complete,
    in_use,
    load_manifest,
    newest,
    prune,
    survey,
    verify,
    write_manifest,
)
from paramserver.checkpoint.place import Inside, Place
from paramserver.errors import CheckpointError
from paramserver.failpoints import arm
from tests.support.unit.checkpoints import content, manifest, save, save_files, temporary_files

T50, T60, T70 = "step-00000050-t1", "step-00000060-t1", "step-00000070-t1"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing here has to survive the machine
    made = Place(str(tmp_path))
    made.prepare()
    yield made
    arm(None)


def names(place: Place) -> list[str]:
    return [made.name for made in complete(place)]


def warnings_of(look: Callable[[], object]) -> list[str]:
    with structlog.testing.capture_logs() as logs:
        look()
    return [f"{entry['checkpoint']}: {entry['reason']}" for entry in logs if entry["log_level"] == "warning"]


def test_a_checkpoint_comes_back(place: Place) -> None:
    assert newest(place) is None
    made = save(place, 50)
    assert newest(place) == load_manifest(place, T50) == made
    assert complete(place) == [made]
    verify(place, made)
    assert content(place, made) == {50.0}


def test_the_newest_is_that_of_the_highest_timeline(place: Place) -> None:
    for version, timeline in ((70, 1), (50, 1), (60, 2), (55, 2), (100_000_000, 1)):
        save(place, version, timeline)
    expected = [(2, 60), (2, 55), (1, 100_000_000), (1, 70), (1, 50)]
    assert [(made.timeline, made.version) for made in complete(place)] == expected
    found = newest(place)
    assert found is not None
    assert found.name == "step-00000060-t2"


def test_without_a_manifest_there_is_no_checkpoint(place: Place) -> None:
    made = save(place, 50)
    save_files(place, 60)
    assert newest(place) == made
    assert [(found.name, found.incomplete) for found in survey(place)] == [(T60, True), (T50, False)]
    with pytest.raises(CheckpointError, match="was never completed"):
        load_manifest(place, T60)


def test_a_manifest_is_not_written_before_its_files(place: Place, tmp_path: Path) -> None:
    weights, state = save_files(place, 50)
    (tmp_path / T50 / state[1].name).rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"state-1-of-2.safetensors is missing"):
        write_manifest(place, manifest(weights, state, 50))
    (tmp_path / T50 / state[1].name).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has 5 bytes, and should have"):
        write_manifest(place, manifest(weights, state, 50))
    assert complete(place) == []


def test_a_coordinator_of_an_older_term_does_not_replace_a_manifest(place: Place) -> None:
    """E20."""
    made = save(place, 50, term=4)
    with pytest.raises(CheckpointError, match="the coordinator of term 4 has saved this version"):
        save(place, 50, term=3)
    assert newest(place) == made
    assert newest(place) != save(place, 50, term=5)


# ---- the index for other loaders


def test_the_index_names_every_tensor_that_a_state_dict_has(place: Place, tmp_path: Path) -> None:
    hidden = {"tensors": [{"name": "weight", "persistent": True}, {"name": "bias"}]}
    save(place, 50)
    save(place, 60, model=hidden)
    index = json.loads((tmp_path / T50 / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 40}
    loaded = {name: load_file(tmp_path / T50 / file)[name] for name, file in index["weight_map"].items()}
    assert set(loaded) == {"weight", "bias"}
    assert torch.equal(loaded["weight"], torch.full((2, 3), 50.0))
    index = json.loads((tmp_path / T60 / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 24}, "weight_map": {"weight": "weights-0-of-2.safetensors"}}


# ---- damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def zero_page(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes(min(4096, len(data))) + data[4096:])


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte short": (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes, and should have"),
    "a bit flipped": (flip, "its content is not what was written"),
    "a page of zeros": (zero_page, "is damaged: "),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes, and should have"),
    "missing": (os.unlink, "is missing"),
    "that of another step": (
        lambda path: path.write_bytes((path.parent.parent / T50 / path.name).read_bytes()),
        "its content is not what was written",
    ),
    "a link": (link, "not a regular file"),
    "a pipe": (pipe, "not a regular file"),
}


@pytest.mark.parametrize("file", ["weights-0-of-2.safetensors", "state-1-of-2.safetensors"])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(place: Place, tmp_path: Path, what: str, file: str) -> None:
    """E09."""
    good = save(place, 50)
    save(place, 60)
    damage, reason = DAMAGE[what]
    damage(tmp_path / T60 / file)
    found = []
    warned = warnings_of(lambda: found.append(newest(place)))
    assert found == [good]
    assert len(warned) == 1
    assert warned[0].startswith(f"{T60}: ")
    assert file in warned[0]
    assert reason in warned[0]
    assert content(place, good) == {50.0}


MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte short": (lambda path: os.truncate(path, path.stat().st_size - 3), "no proper JSON"),
    "that of another step": (
        lambda path: path.write_bytes((path.parent.parent / T50 / path.name).read_bytes()),
        f"the manifest is that of {T50}",
    ),
    "another number": (
        lambda path: path.write_text(path.read_text().replace('"seed": 7', '"seed": 8')),
        "its content is not what was written",
    ),
    "a later format": (
        lambda path: path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2')),
        "it has format 2, which a later paramserver has written",
    ),
    "a name that leads out": (
        lambda path: path.write_text(path.read_text().replace("state-1-of", "../../etc/x")),
        "damaged",
    ),
    "a pickle": (lambda path: path.write_bytes(b"cos\nsystem\n(S'touch fired'\ntR."), "no proper JSON"),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_is_not_right_is_passed_over_with_a_warning(place: Place, tmp_path: Path, what: str) -> None:
    """E09, E18, J07."""
    good = save(place, 50)
    save(place, 60)
    change, reason = MANIFESTS[what]
    before = (tmp_path / T60 / "MANIFEST.json").read_bytes()
    change(tmp_path / T60 / "MANIFEST.json")
    assert (tmp_path / T60 / "MANIFEST.json").read_bytes() != before
    found = []
    warned = warnings_of(lambda: found.append(newest(place)))
    assert found == [good]
    assert len(warned) == 1
    assert reason in warned[0]
    assert not list(Path.cwd().glob("fired"))


def test_weights_that_are_not_finite_are_not_good(place: Place) -> None:
    """E26."""
    good = save(place, 50)
    bad = save(place, 60, fill=float("nan"), finite=False)
    assert warnings_of(lambda: newest(place)) == [f"{T60}: it has NaN or infinite weights"]
    assert newest(place) == good
    assert newest(place, good_only=False) == bad
    assert complete(place) == [bad, good]


# ---- what may go


def test_the_newest_stay(place: Place) -> None:
    for version in (10, 20, 30, 40):
        save(place, version)
    assert prune(place, 2) == ["step-00000010-t1", "step-00000020-t1"]
    assert prune(place, 2) == []
    assert names(place) == ["step-00000040-t1", "step-00000030-t1"]
    assert place.names() == ["step-00000030-t1", "step-00000040-t1"]
    with pytest.raises(ValueError, match="at least one"):
        prune(place, 0)


def test_protected_ones_stay(place: Place) -> None:
    for version in (50, 60, 70):
        save(place, version)
    assert prune(place, 1, {T50}) == [T60]
    assert names(place) == [T70, T50]


def test_the_newest_good_ones_stay_behind_those_that_are_not(place: Place) -> None:
    save(place, 40)
    save(place, 50)
    for version in (60, 70, 80):
        save(place, version, finite=False)
    assert prune(place, 1) == ["step-00000040-t1", T60, T70]
    found = newest(place)
    assert found is not None
    assert found.name == T50


def test_unfinished_and_damaged_ones_go_once_something_newer_is_complete(place: Place, tmp_path: Path) -> None:
    save_files(place, 40)
    save(place, 50)
    save_files(place, 60)
    assert prune(place, 2) == ["step-00000040-t1"]
    save(place, 55)
    (tmp_path / "step-00000055-t1" / "weights-0-of-2.safetensors").unlink()
    save(place, 70)
    assert prune(place, 2) == ["step-00000055-t1", T60]
    assert names(place) == [T70, T50]
    assert place.names() == [T50, T70]


def test_nothing_goes_before_something_is_complete(place: Place) -> None:
    save_files(place, 50)
    save_files(place, 60)
    assert prune(place, 1) == []
    assert place.names() == [T50, T60]


def test_those_of_a_later_paramserver_stay(place: Place, tmp_path: Path) -> None:
    save(place, 50)
    path = tmp_path / T50 / "MANIFEST.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    save(place, 60)
    assert prune(place, 1) == []
    assert place.names() == [T50, T60]


def test_foreign_files_stay(place: Place, tmp_path: Path) -> None:
    save(place, 50)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / T50 / "notes.txt").write_text("mine")
    (tmp_path / T50 / "notes").mkdir()
    save(place, 60)
    assert prune(place, 2) == []
    assert (tmp_path / T50 / "notes.txt").exists()
    assert prune(place, 1) == [T50]
    assert [path.name for path in (tmp_path / T50).iterdir()] == ["notes"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_checkpoint_that_is_read_stays(place: Place, tmp_path: Path) -> None:
    """E19."""
    save(place, 50)
    save(place, 60)
    with in_use(place, T50), in_use(place, T50):
        assert prune(place, 1) == []
    assert prune(place, 1) == [T50]
    with pytest.raises(CheckpointError, match="this checkpoint is gone"), in_use(place, T50):
        pass
    assert place.names() == [T60]
    assert sorted(path.name for path in (tmp_path / T60).iterdir() if path.name.startswith(".")) == []


def test_a_reader_that_died_keeps_it_for_an_hour(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place, 50)
    save(place, 60)
    use = in_use(place, T50)
    use.__enter__().end = lambda: None  # type: ignore[method-assign]
    use.__exit__(None, None, None)
    newest_use = in_use(place, T60)
    newest_use.__enter__().end = lambda: None  # type: ignore[method-assign]
    newest_use.__exit__(None, None, None)
    import time

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3590)
    assert prune(place, 1) == []
    monkeypatch.setattr(time, "time", lambda: now + 3610)
    assert prune(place, 1) == [T50]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_a_reader_may_read_for_longer_than_an_hour(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place, 50)
    save(place, 60)
    import time

    now = time.time()
    with in_use(place, T50) as use:
        monkeypatch.setattr(time, "time", lambda: now + 3590)
        use.renew()
        monkeypatch.setattr(time, "time", lambda: now + 7000)
        assert prune(place, 1) == []


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"since": "x"}', b"\xff", b'{"since": 1e999}', b"[" * 4000])
def test_a_mark_that_nobody_of_us_made_keeps_nothing(place: Place, tmp_path: Path, text: bytes) -> None:
    save(place, 50)
    save(place, 60)
    (tmp_path / T50 / ".in-use-0123").write_bytes(text)
    assert prune(place, 1) == [T50]


def test_a_reader_that_comes_while_a_checkpoint_is_removed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. prune sees no mark; 2. a reader leaves one and finds a manifest; 3. prune takes the manifest away, looks
    again, and puts it back."""
    made = save(place, 50)
    save(place, 60)
    remove = Inside.remove
    readers = []

    def remove_later(inside: Inside, name: str) -> None:
        if name == "MANIFEST.json":
            monkeypatch.undo()
            readers.append(in_use(place, T50))
            readers[0].__enter__()
        remove(inside, name)

    monkeypatch.setattr(Inside, "remove", remove_later)
    assert prune(place, 1) == []
    assert content(place, load_manifest(place, T50)) == {50.0}
    readers[0].__exit__(None, None, None)
    assert complete(place)[1] == made
    assert prune(place, 1) == [T50]


def test_a_checkpoint_that_is_removed_while_one_looks_is_not_missed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A reader has listed step 50 alone; 2. step 60 is saved and 50 removed; 3. the reader finds 60."""
    save(place, 50)
    read = Inside.read

    def read_later(inside: Inside, name: str, limit: int) -> bytes:
        monkeypatch.undo()
        save(place, 60)
        assert prune(place, 1) == [T50]
        return read(inside, name, limit)

    monkeypatch.setattr(Inside, "read", read_later)
    found = newest(place)
    assert found is not None
    assert found.name == T60


def test_a_directory_that_cannot_be_written_to_can_be_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    made = save(place, 50)
    real = os.open

    def no_writing(path: str, flags: int, *rest: int, **others: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **others)

    monkeypatch.setattr(os, "open", no_writing)
    assert newest(place) == made


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_behind_a_url_everything_is_the_same(tmp_path: Path, kind: str) -> None:
    import fsspec

    root = str(tmp_path / "root") if kind == "local" else f"/{tmp_path.name}"
    place = Place(f"{kind}://{root}/run")
    place.prepare()
    save(place, 50)
    second = save(place, 60)
    save_files(place, 70)
    assert newest(place) == second
    verify(place, second)
    assert content(place, second) == {60.0}
    with in_use(place, T50):
        assert prune(place, 1) == []
    assert prune(place, 1) == [T50]
    assert place.names() == [T60, T70]
    again = save(place, 60, fill=1.0)
    assert content(place, again) == {1.0}
    assert prune(place, 1) == []
    fs = fsspec.filesystem(kind)
    left = sorted(path.rpartition("/")[2] for path in fs.find(f"{root}/run/{T60}"))
    assert left == sorted(["MANIFEST.json", "model.safetensors.index.json", *(info.name for info in again.files)])
    fs.pipe_file(f"{root}/run/{T60}/{again.files[0].name}", b"x" * again.files[0].bytes)
    assert newest(place) is None
    fs.rm(root, recursive=True)
    assert temporary_files(tmp_path) == []
