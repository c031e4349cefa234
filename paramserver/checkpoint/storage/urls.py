"""Checkpoints in an object store or another file system that fsspec knows: ``s3://bucket/run``, ``memory://run``.

A file is written under a temporary name and then moved; where a move is a copy, the store makes the copy by itself.
There is no fsync: a store keeps every file that was closed.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator
from typing import Any

from paramserver.checkpoint.names import temporary_name
from paramserver.checkpoint.storage.folder import Bytes
from paramserver.config import hide_password
from paramserver.errors import ConfigError


@contextlib.contextmanager
def _as_os_errors(what: str) -> Iterator[None]:
    """Each library below fsspec has errors of its own; we know OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        text = " ".join(hide_password(str(error)).split())
        raise OSError(f"{what}: {type(error).__name__}: {text}"[:500]) from error


class UrlRoot:
    """A directory of checkpoints that a URL names: a `Root`. Raises ConfigError for a URL that fsspec cannot use."""

    def __init__(self, url: str) -> None:
        shown = hide_password(url)
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(f"{shown} needs fsspec: pip install fsspec, or give a local directory") from error
        try:
            self._fs, path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{shown} cannot be used for checkpoints: {hide_password(str(error))}") from error
        except Exception as error:
            raise ConfigError(f"{shown} cannot be used for checkpoints: {type(error).__name__}") from error
        self._path = str(path).rstrip("/")
        self._shown = shown.rstrip("/")

    def prepare(self) -> None:
        """Create the directory, write a file into it, and read that file back."""
        probe = f"{self._path}/{temporary_name('probe')}"
        try:
            with _as_os_errors("it cannot be written to"):
                if self._fs.isfile(self._path):
                    raise ConfigError(f"{self._shown} is a file; choose another directory for the checkpoints")
                self._fs.makedirs(self._path, exist_ok=True)
                try:
                    self._fs.pipe_file(probe, b"paramserver")
                    if self._fs.cat_file(probe) != b"paramserver":
                        raise OSError("what was written comes back changed")
                finally:
                    with contextlib.suppress(Exception):
                        self._fs.rm_file(probe)
        except OSError as error:
            why = hide_password(error.strerror or str(error))
            raise ConfigError(
                f"checkpoints cannot be written to {self._shown}: {why}; mend that, or choose another directory"
            ) from error

    def folders(self) -> list[str]:
        return _listed(self._fs, self._path, "directory")

    def folder(self, name: str) -> UrlFolder:
        return UrlFolder(self._fs, f"{self._path}/{name}", f"{self._shown}/{name}")

    def top(self) -> UrlFolder:
        return UrlFolder(self._fs, self._path, self._shown)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Object stores have no locks."""
        yield

    def make(self, sibling: str) -> str:
        """Object stores have no directories: a name is taken if something lies under it."""
        with _as_os_errors(sibling):
            self._fs.invalidate_cache()
            if self._fs.exists(self._beside(sibling)):
                raise FileExistsError(f"there is {sibling} already")
            self._fs.makedirs(self._beside(sibling), exist_ok=True)
        return self._beside(sibling)

    def move(self, name: str, sibling: str) -> None:
        """Where a move is a copy, the store makes the copy by itself."""
        with _as_os_errors("move"):
            source = f"{self._path}/{name}"
            self._fs.mv(source, f"{self._beside(sibling)}/{name}", recursive=self._fs.isdir(source))
            self._fs.invalidate_cache()

    def holds(self, path: str) -> bool:
        return False

    def _beside(self, sibling: str) -> str:
        return f"{posixpath.dirname(self._path)}/{sibling}"


class UrlFolder:
    """One checkpoint behind a URL: a `Folder`."""

    def __init__(self, fs: Any, path: str, shown: str) -> None:
        self._fs = fs
        self._path = path
        self.shown = shown

    def files(self) -> list[str]:
        return _listed(self._fs, self._path, "file")

    def size(self, name: str) -> int | None:
        try:
            with _as_os_errors(name):
                found = self._fs.info(f"{self._path}/{name}")["size"]
                return None if found is None else int(found)
        except FileNotFoundError:
            return None

    def open(self, name: str) -> UrlReader:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"there is no {name}")
        return UrlReader(self._fs, f"{self._path}/{name}", size)

    def create(self, temporary: str) -> UrlWriter:
        with _as_os_errors(temporary):
            self._fs.makedirs(self._path, exist_ok=True)
            return UrlWriter(self._fs, self._path, temporary)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors(name):
            self._fs.rm_file(f"{self._path}/{name}")
        self._fs.invalidate_cache()

    def remove_folder(self) -> None:
        """Remove the directory; object stores have none."""
        if self.files():
            return
        with contextlib.suppress(Exception):
            self._fs.rmdir(self._path)
        self._fs.invalidate_cache()


class UrlReader:
    """A file behind a URL: a `Reader`. Every read is a request of its own."""

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs = fs
        self._path = path
        self.size = size

    def read(self, start: int, count: int) -> bytes:
        if not count:
            return b""
        with _as_os_errors(posixpath.basename(self._path)):
            return bytes(self._fs.cat_file(self._path, start=start, end=start + count))

    def close(self) -> None:
        """Nothing is open between two reads."""


class UrlWriter:
    """A file being written behind a URL: a `Writer`."""

    def __init__(self, fs: Any, directory: str, temporary: str) -> None:
        self._fs = fs
        self._directory = directory
        self._path = f"{directory}/{temporary}"
        self._file = fs.open(self._path, "wb")
        self._committed = False

    def write(self, data: Bytes) -> None:
        with _as_os_errors("write"):
            self._file.write(data)

    def sync(self) -> None:
        """Hand over the rest, and hear that the store has it."""
        with _as_os_errors("close"):
            self._file.close()

    def commit(self, name: str) -> None:
        with _as_os_errors("move"):
            self._file.close()
            self._fs.mv(self._path, f"{self._directory}/{name}")
            self._committed = True
            self._fs.invalidate_cache()

    def sync_folder(self) -> None:
        """A store keeps its names itself."""

    def discard(self) -> None:
        if self._committed:
            return
        # An upload in parts is called off where the library can; otherwise the file is finished and then removed.
        with contextlib.suppress(Exception):
            getattr(self._file, "discard", self._file.close)()
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path)


def _listed(fs: Any, path: str, kind: str) -> list[str]:
    try:
        with _as_os_errors("list"):
            fs.invalidate_cache()  # other machines write here, too
            found = fs.ls(path, detail=True)
    except FileNotFoundError:
        return []
    names = (posixpath.basename(str(entry["name"]).rstrip("/")) for entry in found if entry["type"] == kind)
    return sorted(name for name in names if name)
