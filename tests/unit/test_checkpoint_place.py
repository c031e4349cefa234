"""A place is usable or says what to do, and no name leads out of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.checkpoint.names import another_name, checkpoint_name, is_file_name, parse_name
from paramserver.checkpoint.place import Place
from paramserver.errors import CheckpointError, ConfigError

NAME = "step-00000050-t1"


@pytest.fixture(params=["disk", "memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place of each kind."""
    if request.param == "disk":
        yield Place(str(tmp_path / "checkpoints"))
        return
    import fsspec

    root = str(tmp_path) if request.param == "local" else f"/{tmp_path.name}"
    yield Place(f"{request.param}://{root}/checkpoints")
    fs = fsspec.filesystem(request.param)
    if fs.exists(root):
        fs.rm(root, recursive=True)


def test_a_place_is_created_and_leaves_no_trace_of_the_trial(place: Place) -> None:
    assert place.names() == []
    place.prepare()
    place.prepare()
    assert place.names() == []
    inside = place.inside(NAME)
    assert inside.files() == []
    assert inside.size("a") is None
    inside.write_atomically("a.json", b"one")
    inside.write_atomically("a.json", b"three")
    assert place.names() == [NAME]
    assert inside.files() == ["a.json"]
    assert inside.size("a.json") == 5
    assert inside.read("a.json", 5) == b"three"
    with pytest.raises(CheckpointError, match="5 bytes, more than the 4 allowed"):
        inside.read("a.json", 4)
    with pytest.raises(CheckpointError, match=f"cannot read .*{NAME}/b.json"):
        inside.open("b.json")
    reader = inside.open("a.json")
    assert (reader.read(1, 3), reader.read(4, 3), reader.read(0, 0)) == (b"hre", b"e", b"")
    reader.close()
    inside.remove_folder()  # it is not empty and stays
    assert place.names() == [NAME]
    inside.remove("a.json")
    inside.remove("a.json")
    inside.remove_folder()
    inside.remove_folder()
    assert place.names() == []


def test_a_writer_that_gives_up_leaves_nothing(place: Place) -> None:
    place.prepare()
    inside = place.inside(NAME)
    writer = inside.create("a.json")
    writer.write(b"some")
    writer.write(memoryview(b"more"))
    assert not inside.exists("a.json")
    writer.discard()
    assert inside.files() == []


def test_other_directories_are_none_of_our_business(tmp_path: Path) -> None:
    for name in ("step-00000050-t1", "step-50-t1", "step-00000050-t1.old", "notes", "step-00000050-t01", "STEP"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000060-t1").write_text("a file")
    (tmp_path / "step-00000070-t1").symlink_to(tmp_path / "notes")
    assert Place(str(tmp_path)).names() == ["step-00000050-t1"]


@pytest.mark.parametrize(("version", "timeline"), [(0, 0), (0, 1), (50, 1), (10**8 - 1, 2), (10**8, 3), (10**17, 99)])
def test_names_go_both_ways(version: int, timeline: int) -> None:
    assert parse_name(checkpoint_name(version, timeline)) == (version, timeline)


def test_names_as_people_know_them() -> None:
    assert checkpoint_name(50, 1) == "step-00000050-t1"
    assert another_name("a.b.safetensors", "0123456789abcdef") == "a.b-0123456789ab.safetensors"


HOSTILE = (
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc/passwd",
    "a\0",
    "a\nb",
    "~",
    ".hidden",
    "ü",
    "x" * 200,
    "a b",
    "-rf",
    "a\\b",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(tmp_path: Path, name: str) -> None:
    """J10."""
    place = Place(str(tmp_path / "checkpoints"))
    place.prepare()
    with pytest.raises(CheckpointError, match="no name of a checkpoint"):
        place.inside(name)
    with pytest.raises(CheckpointError, match="no name of a checkpoint"):
        place.inside(f"step-00000050-t1{name or '/'}")
    assert not is_file_name(name)
    inside = place.inside(NAME)
    for attempt in (inside.size, inside.open, inside.create, lambda name: inside.write_atomically(name, b"")):
        with pytest.raises(CheckpointError, match="no name of a file"):
            attempt(name)
    assert list(tmp_path.rglob("*")) == [tmp_path / "checkpoints"]


@pytest.mark.parametrize("url", ["", "a\0b", "a\nb", "s3://bucket/\n"])
def test_what_is_no_place(url: str) -> None:
    with pytest.raises(ConfigError, match="no place for checkpoints"):
        Place(url)


def test_an_unknown_kind_of_url() -> None:
    with pytest.raises(ConfigError, match="cannot be used for checkpoints: Protocol not known: nowhere"):
        Place("nowhere://user:secret@host/x")


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        Place("nowhere://user:secret@host/x")
    assert "secret" not in str(raised.value)
    assert "secret" not in str(Place("memory://user:secret@host/x"))


# ---- E12: what is wrong is said at the start


def test_a_missing_parent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no directory {tmp_path}/a; create that"):
        Place(str(tmp_path / "a" / "b")).prepare()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious")
    with pytest.raises(ConfigError, match="is a file; remove it, or choose another"):
        Place(str(tmp_path / "a")).prepare()
    with pytest.raises(ConfigError, match="a/b cannot be created, as there is no directory"):
        Place(str(tmp_path / "a" / "b")).prepare()
    assert (tmp_path / "a").read_text() == "precious"


def test_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling"):
        with pytest.raises(ConfigError, match="is a symbolic link; give the directory that it points to"):
            Place(str(tmp_path / name)).prepare()


def test_a_directory_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by the system, which the tests' user may be above: hence by a stand-in."""
    real = os.open

    def no_files(path: str, flags: int, *rest: int, **others: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **others)

    monkeypatch.setattr(os, "open", no_files)
    with pytest.raises(ConfigError, match=f"cannot be written to {tmp_path}: Permission denied; mend that"):
        Place(str(tmp_path)).prepare()


def test_a_file_in_the_way_behind_a_url(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"/{tmp_path.name}", b"precious")
    with pytest.raises(ConfigError, match="is a file"):
        Place(f"memory://{tmp_path.name}").prepare()
    fs.rm(f"/{tmp_path.name}")


# ---- links inside are not followed


def test_links_in_a_place_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "a.json").write_text("secret")
    place = Place(str(tmp_path / "checkpoints"))
    place.prepare()
    (tmp_path / "checkpoints" / NAME).mkdir()
    (tmp_path / "checkpoints" / NAME / "a.json").symlink_to(secret / "a.json")
    os.mkfifo(tmp_path / "checkpoints" / NAME / "pipe.json")
    inside = place.inside(NAME)
    for name in ("a.json", "pipe.json"):
        with pytest.raises(CheckpointError, match=r"\.json"):
            inside.open(name)
        with pytest.raises(CheckpointError, match="not a regular file"):
            inside.size(name)
    inside.write_atomically("a.json", b"ours")  # replaces the link, not what it points to
    assert (secret / "a.json").read_text() == "secret"

    (tmp_path / "checkpoints" / "step-00000060-t1").symlink_to(secret)
    inside = place.inside("step-00000060-t1")
    attempts = (
        inside.files,
        lambda: inside.size("a.json"),
        lambda: inside.open("a.json"),
        lambda: inside.write_atomically("b.json", b""),
        lambda: inside.remove("a.json"),
    )
    for attempt in attempts:
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            attempt()
    assert [path.name for path in secret.iterdir()] == ["a.json"]


def test_neither_torch_nor_fsspec_is_loaded_for_a_directory() -> None:
    code = (
        "import sys; from paramserver.checkpoint import catalog, place; place.Place('x').names();"
        "print([name for name in ('torch', 'fsspec', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("refused", ["rename", "mkdir"])
def test_a_directory_that_is_a_mount_is_set_aside_inside_itself(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be moved out of a mount, or made beside it. No empty directory is left."""
    place = Place(str(tmp_path / "mount"))
    place.prepare()
    rename, mkdir = os.rename, Path.mkdir

    def moved(source: Path, target: Path) -> None:
        if Path(target).is_relative_to(tmp_path / "mount"):
            return rename(source, target)
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def made(path: Path, *args: Any, **more: Any) -> None:
        if path.parent == tmp_path:
            raise OSError(errno.EROFS, "Read-only file system")
        mkdir(path, *args, **more)

    monkeypatch.setattr(os, "rename", moved)
    if refused == "mkdir":
        monkeypatch.setattr(Path, "mkdir", made)
    for number in (1, 2):
        place.inside(NAME).write_atomically("MANIFEST.json", b"{}")
        assert place.set_aside([]) == str(tmp_path / "mount" / f"mount.old-{number}")
        assert place.names() == []
        assert (tmp_path / "mount" / f"mount.old-{number}" / NAME / "MANIFEST.json").is_file()
    assert os.listdir(tmp_path) == ["mount"]
    assert sorted(os.listdir(tmp_path / "mount")) == ["mount.old-1", "mount.old-2"]
