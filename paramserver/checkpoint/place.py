"""Where checkpoints lie: a local directory, or a URL that fsspec knows. fsspec is loaded for URLs only."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from paramserver.checkpoint.names import check_checkpoint_name, check_file_name, parse_name, temporary_name
from paramserver.checkpoint.storage.disk import DiskRoot
from paramserver.checkpoint.storage.folder import Folder, Reader, Root, Writer, write_whole
from paramserver.config import hide_password
from paramserver.errors import CheckpointError, ConfigError


class Place:
    """A directory of checkpoints; it need not exist yet.

    ``url``: a path, or a URL such as ``s3://bucket/run``. Raises ConfigError for what cannot be either.
    """

    def __init__(self, url: str) -> None:
        if not url or not url.isprintable():
            why = " has characters that are no printable text in UTF-8, and" if url else ""
            raise ConfigError(f"{url[:200]!r}{why} is no place for checkpoints; give another directory or a URL")
        url = url.removeprefix("file://")
        self.local = "://" not in url
        self.url = url if self.local else url.rstrip("/")
        # Without passwords; for people and logs.
        self.shown = hide_password(self.url)
        self._root: Root
        if self.local:
            self._root = DiskRoot(Path(url).expanduser())
        else:
            from paramserver.checkpoint.storage.urls import UrlRoot

            self._root = UrlRoot(self.url)

    def __str__(self) -> str:
        return self.shown

    def prepare(self) -> None:
        """Create the directory and try to write into it. Raises ConfigError that says what to do."""
        self._root.prepare()

    def names(self) -> list[str]:
        """The names of the checkpoints in this place, complete or not. Raises CheckpointError."""
        with explained("list", self.shown):
            return [name for name in self._root.folders() if parse_name(name) is not None]

    def inside(self, checkpoint: str) -> Inside:
        """The files of one checkpoint, which need not exist yet. Raises CheckpointError for a hostile name."""
        check_checkpoint_name(checkpoint)
        return Inside(self._root.folder(checkpoint))

    @property
    def top(self) -> Inside:
        """The files beside the checkpoints."""
        return Inside(self._root.top())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the place's lock, which others on this machine, and on some network file systems, wait for.

        Raises CheckpointError.
        """
        with contextlib.ExitStack() as held:
            with explained("open", self.shown):
                held.enter_context(self._root.lock())
            yield

    def set_aside(self, files: Sequence[str]) -> str:
        """Move all checkpoints, and these ``files``, to another place beside this one; returns the other place.

        A directory that is mounted by itself gets the other place inside.

        Raises CheckpointError. Files that were moved before the error stay moved. Nothing is deleted.
        """
        base = self.url.rstrip("/").rpartition("/")[2] if not self.local else self._absolute().name
        for number in itertools.count(1):
            sibling = f"{base}.old-{number}"
            try:
                with explained("create", sibling):
                    made = self._root.make(sibling)
                break
            except CheckpointError as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
        for name in (*self.names(), *(file for file in files if self.top.exists(file))):
            with explained("move", f"{self.shown}/{name}"):
                self._root.move(name, sibling)
        if self.local:
            return made
        return hide_password(f"{self.url.rstrip('/').rpartition('/')[0]}/{sibling}")

    def holds(self, path: str) -> bool:
        """Whether ``path``, an absolute path of this machine, leads to this directory."""
        return self._root.holds(path)

    def same(self, other: Place) -> bool:
        """Whether both places are the same directory."""
        if self.local and other.local:
            return self._absolute() == other._absolute() or self.holds(str(other._absolute()))
        return self.url == other.url

    def _absolute(self) -> Path:
        return Path(self.url).expanduser().absolute()

    @property
    def path(self) -> str:
        """The absolute path, or the URL without passwords."""
        return str(self._absolute()) if self.local else self.shown


def located(where: str) -> tuple[Place, str]:
    """A directory of checkpoints, or one checkpoint in it, as people name it: the place, and a name or "".

    Raises ConfigError for what cannot be a place, and for a local directory that does not exist.
    """
    place = Place(where)
    if place.local:
        path = Path(place.url).expanduser().absolute()
        if not path.is_dir():
            raise ConfigError(f"there is no directory {where}")
        return (Place(str(path.parent)), path.name) if parse_name(path.name) is not None else (place, "")
    parent, _, name = place.url.rpartition("/")
    return (Place(parent), name) if parse_name(name) is not None and not parent.endswith(":/") else (place, "")


class Inside:
    """The files of one checkpoint. Names are checked, and every error is a CheckpointError that names the place."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def where(self, name: str) -> str:
        """A file as people know it."""
        return f"{self._folder.shown}/{name}"

    def files(self) -> list[str]:
        """All files, temporary ones among them."""
        with explained("list", self._folder.shown):
            return self._folder.files()

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        check_file_name(name)
        with explained("read", self.where(name)):
            return self._folder.size(name)

    def open(self, name: str) -> Reader:
        """Open for reading in ranges. The reader's own errors are OSError."""
        check_file_name(name)
        with explained("read", self.where(name)):
            return self._folder.open(name)

    def read(self, name: str, limit: int) -> bytes:
        """A whole small file; one of more than ``limit`` bytes is refused."""
        reader = self.open(name)
        try:
            if reader.size > limit:
                raise CheckpointError(f"{self.where(name)} has {reader.size} bytes, more than the {limit} allowed")
            with explained("read", self.where(name)):
                return reader.read(0, reader.size)
        finally:
            reader.close()

    def create(self, name: str) -> Writer:
        """Begin ``name`` under a temporary name. The writer's own errors are OSError."""
        check_file_name(name)
        with explained("write", self.where(name)):
            return self._folder.create(temporary_name(name.lstrip(".")))

    def write_atomically(self, name: str, data: bytes) -> None:
        """Write or replace a small file: readers see the old or the new content."""
        writer = self.create(name)
        with explained("write", self.where(name)):
            write_whole(writer, name, [data])

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with explained("remove", self.where(name)):
            self._folder.remove(name)

    def remove_folder(self) -> None:
        """Remove the directory, if it is empty."""
        with explained("remove", self._folder.shown):
            self._folder.remove_folder()


@contextlib.contextmanager
def explained(doing: str, where: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError with the action, the place and the reason."""
    try:
        yield
    except OSError as error:
        why = error.strerror or hide_password(str(error)) or type(error).__name__
        raise CheckpointError(f"cannot {doing} {where}: {why}") from error
