"""Strangers at one port, in a process of their own: connections that say nothing, little, or what nobody asked for.

    python flood.py PORT PROTOCOL

A connection that is closed is opened again a second later. When standard input ends, the process prints what it did.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import sys
import time
from collections import Counter

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack("!HBBBI", 0, 0, 4, 0, 0)
PING = struct.pack("!HBBBI", 0, 8, 6, 0, 0) + bytes(8)
GET = b"GET %s HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
# The beginning of a handshake of 512 bytes.
HALF = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)
_BULK = struct.Struct("!2sBBIQ")

# Protocol -> what those who read slowly (not at all) send, and what those without a token send.
SENT = {
    "grpc": (HTTP2 + PING * 1000, HTTP2),
    "http": (GET % b"/" * 100, GET % b"/api/v1/status"),
    "bulk": (_BULK.pack(b"PS", 1, 1, 64, 0) + b"x" * 63, _BULK.pack(b"PS", 1, 1, 32, 0) + b"x" * 32 + bytes(200_000)),
}
_ESTABLISHED = 1  # of the kernel's states
# So many new connections after each pause: 500 a second.
_AT_ONCE, _PAUSE_S = 10, 0.02
COUNTS = {"idle": 2000, "slow": 200, "hello": 200, "half": 200}


class Stranger:
    """One connection. Of all kinds, only "hello" reads what comes, and answers the pings of HTTP/2."""

    def __init__(self, kind: str, port: int, protocol: str) -> None:
        self.kind = kind
        slow, hello = SENT[protocol]
        self._http2, self._left = protocol == "grpc", b""
        self.sock = socket.socket()
        self.sock.settimeout(1.0)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setblocking(False)
        with contextlib.suppress(OSError):
            self.sock.send({"idle": b"", "slow": slow, "hello": hello, "half": HALF}[kind])

    def alive(self) -> bool:
        """Whether the other side has not closed the connection."""
        try:
            while self.kind == "hello" and (data := self.sock.recv(65536)):
                if self._http2:
                    self._pong(data)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED

    def _pong(self, data: bytes) -> None:
        self._left += data
        while len(self._left) >= 9:
            length = int.from_bytes(self._left[:3], "big")
            frame, self._left = self._left[: 9 + length], self._left[9 + length :]
            if frame[3] in (4, 6) and not frame[4] & 1:
                body = frame[9:] if frame[3] == 6 else b""
                self.sock.send(len(body).to_bytes(3, "big") + frame[3:4] + b"\x01" + bytes(4) + body)


def main() -> None:
    """See above."""
    port, protocol = int(sys.argv[1]), sys.argv[2]
    done: Counter[str] = Counter()
    there: list[Stranger] = []
    wanted = [kind for kind, count in COUNTS.items() for _ in range(count)]
    told, looked_at = False, time.monotonic()
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        opening, wanted = wanted[:_AT_ONCE], wanted[_AT_ONCE:]
        for kind in opening:
            try:
                there.append(Stranger(kind, port, protocol))
                done[f"opened {kind}"] += 1
            except OSError:  # the port has not taken those before it yet
                done[f"refused {kind}"] += 1
                wanted.append(kind)
        if not told and min(done[f"opened {kind}"] - count for kind, count in COUNTS.items()) >= 0:
            told = True
            print("flooding", flush=True)
        if time.monotonic() - looked_at > 1.0:
            looked_at = time.monotonic()
            gone = [one for one in there if not one.alive()]
            closed = {one.sock for one in gone}
            there = [one for one in there if one.sock not in closed]
            for one in gone:
                done[f"closed {one.kind}"] += 1
                wanted.append(one.kind)
                one.sock.close()
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
