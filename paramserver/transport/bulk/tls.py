"""TLS of bulk connections: the certificates of gRPC, and the same demands."""

from __future__ import annotations

import asyncio
import socket
import ssl

from paramserver.transport.bulk.reading import Reader
from paramserver.transport.bulk.sockets import Moving, Plain, Tls, tune
from paramserver.transport.security.tls import Certificates, Identity, role_of, server_name


class Contexts:
    """The TLS context of this process, as a caller or as the called side. Replaced files count for new connections."""

    def __init__(self, certificates: Certificates | None, called: bool) -> None:
        self._certificates, self._called = certificates, called
        self._made: tuple[Identity, ssl.SSLContext] | None = None

    def current(self) -> tuple[Identity | None, ssl.SSLContext | None]:
        """The present certificate, and a context with it; None without TLS. Raises ConfigError, DeniedError."""
        if self._certificates is None:
            return None, None
        self._certificates.check_dates()
        identity = self._certificates.current()
        if self._made is None or self._made[0] is not identity:
            self._made = identity, self._context(self._certificates, identity)
        return self._made

    def _context(self, certificates: Certificates, identity: Identity) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if self._called else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The kernel encrypts, where it can; Python names this option from 3.12 on.
        context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0x8)
        context.load_cert_chain(*certificates.pair())
        context.load_verify_locations(cadata=identity.ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
        return context


async def greet(sock: socket.socket, context: ssl.SSLContext | None, peer: str = "") -> tuple[Moving, str]:
    """The connection as lines use it, and the role in the peer's certificate; empty without TLS.

    ``peer``: the role that the called side must have; empty at the called side. Takes ``sock`` over. Raises OSError.
    """
    try:
        tune(sock)
        if context is None:
            return Plain(sock), ""
        tls = context.wrap_socket(
            sock,
            server_side=not peer,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
            server_hostname=server_name(peer) if peer else None,
        )
    except BaseException:
        sock.close()
        raise
    try:
        await _shake_hands(tls)
        names = (tls.getpeercert() or {}).get("subjectAltName", ())
        uris = [str(name[1]).encode() for name in names if name[0] == "URI"]
        return Tls(tls), role_of({"peer_uri": uris})
    except BaseException:
        tls.close()
        raise


async def shown(moving: Moving) -> bytes:
    """The token with which a connection begins. No byte behind the token is received.

    Raises OSError, and ProtocolError as soon as something else has come.
    """
    reader = Reader(moving, hello=True)
    loop = asyncio.get_running_loop()
    while (record := reader.next()) is None:
        if reader.hung_up:
            raise ConnectionResetError("it closed the connection")
        await _ready(moving.fileno(), loop.add_reader, loop.remove_reader)
    return record.header


async def _shake_hands(tls: ssl.SSLSocket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            tls.do_handshake()
            return
        except ssl.SSLWantReadError:
            await _ready(tls.fileno(), loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await _ready(tls.fileno(), loop.add_writer, loop.remove_writer)


async def _ready(fd: int, add: object, remove: object) -> None:
    ready = asyncio.Event()
    add(fd, ready.set)  # type: ignore[operator]
    try:
        await ready.wait()
    finally:
        remove(fd)  # type: ignore[operator]
