"""Checkpoints on a local disk, or on a network file system that looks like one. Symbolic links are not followed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paramserver.checkpoint.storage.folder import Bytes
from paramserver.errors import ConfigError
from paramserver.failpoints import touch

# Some network file systems cannot do this to a directory; their names are safe once they are there.
_NO_SUCH_SYNC = {errno.EINVAL, errno.ENOTSUP}
# A directory that is a mount of its own: nothing can be moved out of it, or nothing can be made beside it.
_MOUNTED = {errno.EXDEV, errno.EROFS, errno.EACCES, errno.EPERM}


class DiskRoot:
    """A local directory of checkpoints: a `Root`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # The directory in which `make` makes others.
        self._beside = path.parent

    def prepare(self) -> None:
        """Create the directory (its parent must exist), and try to write into it."""
        path = self._path
        try:
            if path.is_symlink():
                raise ConfigError(f"{path} is a symbolic link; give the directory that it points to")
            if path.exists() and not path.is_dir():
                raise ConfigError(f"{path} is a file; remove it, or choose another directory for the checkpoints")
            if not path.exists():
                if not path.parent.is_dir():
                    raise ConfigError(f"{path} cannot be created, as there is no directory {path.parent}; create that")
                with contextlib.suppress(FileExistsError):  # others may prepare it at the same time
                    path.mkdir()
                _sync_directory(path.parent)
            with tempfile.TemporaryFile(dir=path) as probe:
                probe.write(b"paramserver")
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(
                f"checkpoints cannot be written to {path}: {why}; mend that, or choose another directory"
            ) from error

    def folders(self) -> list[str]:
        try:
            touch(writes=False)
            with os.scandir(self._path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def folder(self, name: str) -> DiskFolder:
        return DiskFolder(self._path / name)

    def top(self) -> DiskFolder:
        return DiskFolder(self._path, made=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """A lock of the directory itself; it ends with the process. Some network file systems have none."""
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def make(self, sibling: str) -> str:
        made = self._beside / sibling
        try:
            made.mkdir()
            self._try_move(made)
        except OSError as error:
            if error.errno not in _MOUNTED or self._beside == self._path:
                raise
            self._beside = self._path
            return self.make(sibling)
        _sync_directory(self._beside)
        return str(made)

    def _try_move(self, made: Path) -> None:
        """Raises OSError, and removes ``made``, if nothing can be moved there."""
        probe = Path(tempfile.mkdtemp(prefix=".probe-", dir=self._path))
        try:
            os.rename(probe, made / probe.name)
            probe = made / probe.name
        except OSError:
            made.rmdir()
            raise
        finally:
            probe.rmdir()

    def move(self, name: str, sibling: str) -> None:
        target = self._beside / sibling
        os.rename(self._path / name, target / name)
        _sync_directory(target)
        _sync_directory(self._path)

    def holds(self, path: str) -> bool:
        try:
            return os.path.samefile(path, self._path)
        except OSError:
            return False


class DiskFolder:
    """One checkpoint on disk: a `Folder`."""

    def __init__(self, path: Path, made: bool = False) -> None:
        """``made``: the directory exists. If somebody has removed it since, it is not made again."""
        self._path = path
        self._made = made
        self.shown = str(path)

    def files(self) -> list[str]:
        try:
            touch(writes=False)
            self._refuse_link()
            with os.scandir(self._path) as entries:
                return sorted(entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        try:
            touch(writes=False)
            self._refuse_link()
            found = os.stat(self._path / name, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        return found.st_size

    def open(self, name: str) -> DiskReader:
        touch(writes=False)
        self._refuse_link()
        return DiskReader(self._path / name)

    def create(self, temporary: str) -> DiskWriter:
        touch(writes=True)
        if not self._made:
            with contextlib.suppress(FileExistsError):
                self._path.mkdir()
                _sync_directory(self._path.parent)
        self._refuse_link()
        return DiskWriter(self._path, temporary)

    def remove(self, name: str) -> None:
        self._refuse_link()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path / name)
            _sync_directory(self._path)

    def remove_folder(self) -> None:
        try:
            self._path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _refuse_link(self) -> None:
        if self._path.is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link", str(self._path))


class DiskReader:
    """An open file: a `Reader`."""

    def __init__(self, path: Path) -> None:
        # Without O_NONBLOCK a pipe of that name would be waited for.
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self.size = found.st_size

    def read(self, start: int, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = os.pread(self._fd, min(count, 1 << 30), start)
            if not part:
                break
            parts.append(part)
            start += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskWriter:
    """A file being written: a `Writer`."""

    def __init__(self, directory: Path, temporary: str) -> None:
        self._directory = directory
        self._path = directory / temporary
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o666)

    def write(self, data: Bytes) -> None:
        touch(writes=True)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view[: 1 << 30]) :]

    def sync(self) -> None:
        os.fsync(self._fd)

    def commit(self, name: str) -> None:
        self._close()
        os.replace(self._path, self._directory / name)

    def sync_folder(self) -> None:
        _sync_directory(self._directory)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SUCH_SYNC:
            raise
    finally:
        os.close(fd)
