"""Memory that is shared between processes, and how they hand it to each other."""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.transport.shm import meeting, segments
from paramserver.transport.shm.meeting import Meeting, Visit, sweep
from paramserver.transport.shm.segments import PAGE, Foreign, Segment
from paramserver.worker.memory.regions import Region

pytestmark = pytest.mark.skipif(not segments.available(), reason="Linux only")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    # The path of a socket must be short.
    short = Path(f"/dev/shm/test-{os.getpid()}")
    short.mkdir()
    yield short
    for entry in short.iterdir():
        entry.unlink()
    short.rmdir()


def foreign(segment: Segment) -> Foreign:
    return Foreign(os.dup(segment.reading_fd), segment.nbytes)


def test_what_one_writes_the_other_reads_and_cannot_change() -> None:
    segment = Segment(2 * PAGE)
    theirs = foreign(segment)
    segment.reserve(0, PAGE)
    segment.view[:5] = b"hello"
    assert bytes(theirs.view[:5]) == b"hello"
    assert theirs.view.readonly
    with pytest.raises(PermissionError):
        mmap.mmap(theirs.fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match=r"(?i)bad file|invalid"):
        os.write(theirs.fd, b"x")


def test_nobody_else_can_write_to_it_by_opening_it_anew() -> None:
    """Every process that has a descriptor of a file without a name can open it by its name in /proc."""
    segment = Segment(2 * PAGE)
    theirs = foreign(segment)
    writing = os.open(f"/proc/self/fd/{theirs.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(writing, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.write(writing, b"x")
        with pytest.raises(PermissionError):
            os.pwrite(writing, b"x", PAGE)
    finally:
        os.close(writing)
    segment.reserve(0, 2 * PAGE)
    segment.view[-1:] = b"x"
    assert bytes(theirs.view[-1:]) == b"x"


def test_nobody_can_change_its_size() -> None:
    segment = Segment(2 * PAGE)
    writing = os.open(f"/proc/self/fd/{segment.reading_fd}", os.O_RDWR)
    try:
        for size in (PAGE, 3 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(writing, size)
    finally:
        os.close(writing)


def test_memory_is_taken_when_it_is_reserved() -> None:
    segment = Segment(100 * PAGE)
    assert os.fstat(segment.reading_fd).st_blocks == 0
    segment.reserve(10 * PAGE, 5 * PAGE)
    assert os.fstat(segment.reading_fd).st_blocks * 512 == 5 * PAGE


def test_views_outlive_the_descriptors() -> None:
    segment = Segment(PAGE)
    theirs = foreign(segment).view
    mine = segment.view
    segment.close()
    segment.close()
    mine[:2] = b"ok"
    assert bytes(theirs[:2]) == b"ok"


def test_what_is_no_segment_is_refused(tmp_path: Path) -> None:
    segment = Segment(PAGE)
    with pytest.raises(ValueError, match="size"):
        Foreign(os.dup(segment.reading_fd), 2 * PAGE)
    plain = tmp_path / "file"
    plain.write_bytes(bytes(PAGE))
    with pytest.raises((ValueError, OSError)):
        Foreign(os.open(plain, os.O_RDONLY), PAGE)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, PAGE)
    with pytest.raises(ValueError, match="still change its size"):
        Foreign(loose, PAGE)


def test_a_meeting_swaps_memory_and_leaves_nothing(folder: Path) -> None:
    mine, theirs = Segment(PAGE), Segment(PAGE)
    meeting = Meeting(folder)
    assert re.fullmatch("paramserver-[0-9a-f]{32}", meeting.name)
    assert (folder / meeting.name).stat().st_mode & 0o777 == 0o600
    visit = Visit(meeting.name, theirs.reading_fd, folder=folder)
    got = Foreign(meeting.swap(mine.reading_fd)[0], PAGE)
    meeting.close()
    assert list(folder.iterdir()) == []
    given = Foreign(visit.take(), PAGE)
    mine.view[0], theirs.view[0] = 1, 2
    assert (given.view[0], got.view[0]) == (1, 2)


def test_who_cannot_reach_the_place_is_on_another_host(folder: Path) -> None:
    segment = Segment(PAGE)
    with pytest.raises(FileNotFoundError):
        Visit("paramserver-" + "0" * 32, segment.reading_fd, folder=folder)


def test_processes_meet_where_they_are_told_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting._Place, "folder", meeting.FOLDER)
    meeting.meet_in(folder)
    opened = Meeting()
    assert [entry.name for entry in folder.iterdir()] == [opened.name]
    Visit(opened.name, 0).close()
    opened.close()
    meeting.meet_in(folder / "missing")
    with pytest.raises(OSError, match=r"missing cannot be used \(cluster.meeting_dir\): No such file"):
        Meeting()


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ("a", "b", "it is on another host"),
        ("a", "a", "it is on this host, but in a container that has no directory in common"),
        ("", "a", "it is on another host, or in a container that has no directory in common"),
        ("a", "", "it is on another host, or in a container that has no directory in common"),
    ],
)
def test_why_a_meeting_is_not_found(theirs: str, ours: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "host", lambda: ours)
    assert meeting.unseen(theirs).startswith(why)


STRANGER = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(os.pathsep)
from paramserver.transport.shm.meeting import Visit
os.setgroups([])
os.setgid(4711)
os.setuid(4711)
try:
    Visit(sys.argv[2], 0, folder=Path(sys.argv[3]))
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o600, 0o777])
def test_another_user_is_refused(folder: Path, mode: int) -> None:
    """By the mode of the socket, and if that let everybody in, by asking the kernel who it is."""
    opened = Meeting(folder)
    (folder / opened.name).chmod(mode)
    command = [sys.executable, "-c", STRANGER, os.pathsep.join(sys.path), opened.name, str(folder)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "refused\n"
    opened.close()


def test_a_user_whom_the_namespace_does_not_know_is_nobody_in_particular(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user namespace all users from outside have one number, which may be that of this process."""
    monkeypatch.setattr(meeting, "_anybody", os.geteuid)
    opened = Meeting(folder)
    with pytest.raises(PermissionError):
        Visit(opened.name, 0, folder=folder)
    opened.close()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "paramserver-" + "0" * 31 + "/", "paramserver-../../x"])
def test_names_are_names_only(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        Visit(name, 0, folder=folder)


def test_nobody_came_or_left_anything(folder: Path) -> None:
    segment = Segment(PAGE)
    meeting = Meeting(folder)
    with pytest.raises(BlockingIOError):
        meeting.swap(segment.reading_fd)
    visit = Visit(meeting.name, segment.reading_fd, folder=folder)
    meeting.close()
    with pytest.raises(OSError, match=r"(?i)reset|left without"):
        visit.take()


def test_places_of_killed_processes_are_removed_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["paramserver-" + letter * 32 for letter in "ab"]
    for name in names:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / name))
    (folder / ("paramserver-" + "c" * 32)).write_bytes(b"a file of somebody else")
    (folder / "torch_x").touch()
    sweep(folder)
    assert len(list(folder.iterdir())) == 4
    later = max((folder / name).stat().st_ctime for name in names) + 61.0
    monkeypatch.setattr("paramserver.transport.shm.meeting.time.time", lambda: later)
    sweep(folder)
    assert {entry.name for entry in folder.iterdir()} == {"paramserver-" + "c" * 32, "torch_x"}


def test_a_region_shows_lent_pages_until_they_are_written_to() -> None:
    segment = Segment(4 * PAGE)
    segment.view[:] = b"a" * (4 * PAGE)
    theirs = foreign(segment)
    region = Region(3 * PAGE)
    region.lend(0, 2 * PAGE, theirs.fd, PAGE)
    assert bytes(region.view[:1]) == b"a"
    assert bytes(region.view[2 * PAGE : 2 * PAGE + 1]) == b"\0"
    segment.view[PAGE] = ord("b")
    assert bytes(region.view[:1]) == b"b"
    assert region.written(0, 2 * PAGE) == []
    region.view[PAGE] = ord("x")
    assert segment.view[2 * PAGE] == ord("a")
    assert region.written(0, 2 * PAGE) == [PAGE]
    segment.view[2 * PAGE] = ord("c")
    assert region.view[PAGE] == ord("x")
    region.give_back(PAGE + 100, 8)
    assert region.view[PAGE] == ord("c")
    assert region.written(0, 2 * PAGE) == []
    region.own(0, PAGE)
    assert region.view[0] == 0
