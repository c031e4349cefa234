"""Real servers to test against, with the user of docs/store.md, and certificates. All listen on Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paramserver.machine.valkey import find_program
from paramserver.processes.children import dying_with_me
from paramserver.store import Store, open_store

START_S = 20.0
DEADLINE_S = 30.0
PREFIX = "paramserver:job:"
TTL_S = 60.0
SETTINGS = ("maxmemory", "maxmemory-policy", "appendonly")
USER = "paramserver"
PASSWORD = "canary-pass/word@#%"
ADMIN_PASSWORD = "canary-admin"
ROOT = Path(__file__).parents[3]


def programs() -> dict[str, Path]:
    """The server programs to test with: the one that `run` uses, and Redis if this machine has it."""
    first = find_program()
    found = {first.name.partition("-")[0]: first}
    other = shutil.which("redis-server")
    if other is not None:
        found.setdefault("redis", Path(other))
    return found


def user_line() -> str:
    """What docs/store.md tells to paste, with a password."""
    lines = [line for line in (ROOT / "docs/store.md").read_text().splitlines() if line.startswith("ACL SETUSER ")]
    assert len(lines) == 1
    return lines[0].replace(">PASSWORD", f">{PASSWORD}")


class RedisServer:
    """A server of ours in a directory. ``settings``: lines of its configuration."""

    def __init__(self, program: Path, directory: Path, *settings: str) -> None:
        self.directory = directory
        self._program = program
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        # A directory of a test may have too long a path for a socket.
        self._socket_directory = Path(tempfile.mkdtemp(prefix="paramserver-"))
        self.socket = self._socket_directory / "s"

    @property
    def url(self) -> str:
        """With the user of docs/store.md."""
        return f"unix://{USER}:{quote(PASSWORD, safe='')}@{quote(str(self.socket))}?db=0"

    password = PASSWORD

    @property
    def url_without_password(self) -> str:
        """The same, for a password file."""
        return f"unix://{USER}@{quote(str(self.socket))}?db=0"

    @property
    def upstream(self) -> str:
        """For a proxy."""
        return f"unix:{self.socket}"

    def tcp_url(self, address: str, scheme: str = "redis") -> str:
        """The same, at a proxy."""
        return f"{scheme}://{USER}:{quote(PASSWORD, safe='')}@{address}/0"

    def start(self) -> None:
        """Return when it answers."""
        self.launch()
        deadline = time.monotonic() + START_S
        while True:
            assert time.monotonic() < deadline, "the server does not start"
            assert self._process is not None
            assert self._process.poll() is None, "the server ended"
            if self._answers():
                return
            time.sleep(0.01)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(self.socket))
            connection.sendall(f"AUTH {ADMIN_PASSWORD}\r\nPING\r\n".encode())
            with connection.makefile("rb") as replies:
                return [replies.readline(), replies.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
        return False

    def launch(self, *settings: str) -> None:
        """Start it, with more settings perhaps, and do not wait."""
        self.socket.unlink(missing_ok=True)
        log = (self.directory / "server.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                dying_with_me([str(self._program), "-"]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
            )
        lines = [
            "port 0",
            f"unixsocket {self.socket}",
            "appendonly yes",
            'save ""',
            f"user default on >{ADMIN_PASSWORD} ~* &* +@all",
            "user " + user_line().removeprefix("ACL SETUSER "),
            *self._settings,
            *settings,
            "",
        ]
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write("\n".join(lines).encode())

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it; its data stay. May be repeated."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(START_S)

    def signal(self, number: int) -> None:
        """To the running server."""
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        """End it and remove its socket."""
        self.stop(signal.SIGKILL)
        shutil.rmtree(self._socket_directory, ignore_errors=True)

    @contextlib.contextmanager
    def admin(self) -> Iterator[redis.Redis]:
        """A client that may do everything."""
        client = redis.Redis(unix_socket_path=str(self.socket), password=ADMIN_PASSWORD, decode_responses=True)
        try:
            yield client
        finally:
            client.close()

    def command(self, *words: str) -> object:
        """Give a command as the administrator."""
        with self.admin() as admin:
            execute: Callable[..., object] = admin.execute_command
            return execute(*words)

    def permit(self, *rules: str) -> None:
        """Change what the user of docs/store.md may do."""
        self.command("ACL", "SETUSER", USER, *rules)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Afterwards its settings are as they were, and it is empty."""
        with self.admin() as admin:
            before = {name: str(admin.config_get(name)[name]) for name in SETTINGS}
        yield
        with self.admin() as admin:
            for name, value in before.items():
                admin.config_set(name, value)
            admin.flushall()

    def all_keys(self) -> list[str]:
        """All keys there are."""
        with self.admin() as admin:
            return sorted(str(key) for key in admin.scan_iter())


@contextlib.contextmanager
def serving(program: Path, directory: Path, *settings: str) -> Iterator[RedisServer]:
    """A server for the time being."""
    directory.mkdir(parents=True, exist_ok=True)
    server = RedisServer(program, directory, *settings)
    try:
        server.start()
        yield server
    finally:
        server.close()


def run(url: str, test: Callable[[Store], Awaitable[None]], prefix: str = PREFIX) -> None:
    """Run ``test`` with a store."""

    async def main() -> None:
        store = open_store(url, prefix)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(store)
        finally:
            await store.close()

    asyncio.run(main())


def operations(store: Store) -> list[Callable[[], Awaitable[object]]]:
    """One call of each method that asks the server something."""
    return [
        store.ping,
        store.inspect,
        store.leader,
        lambda: store.load("k"),
        lambda: store.save("k", b"", 0),
        lambda: store.delete("k"),
        lambda: store.lead("t", "h", TTL_S),
        lambda: store.resign("t"),
    ]


def assert_no_secret(error: BaseException) -> None:
    """Neither in the error nor in those that led to it."""
    history: BaseException | None = error
    while history is not None:
        assert "canary" not in f"{history} {history!r}"
        history = history.__cause__ or history.__context__


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


# What Python 3.13 wants to see in the certificate of an authority.
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """Signs certificates for servers. Its own is in the file ``certificate``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        signed = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        signed = signed.add_extension(_SIGNS, critical=True)
        self.certificate = directory / "ca.crt"
        self.certificate.write_bytes(_pem(signed.sign(self._key, hashes.SHA256())))

    def server_context(self, host: str) -> ssl.SSLContext:
        """What a server needs that is called ``host``, a name or an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test server")])
        signed = self._builder(subject, key.public_key()).add_extension(
            x509.SubjectAlternativeName([name]), critical=False
        )
        path = self._directory / f"{host}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(private + _pem(signed.sign(self._key, hashes.SHA256())))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
