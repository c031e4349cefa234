"""The time of bare TCP between the hosts of a step: as many bytes both ways at once, over as many connections.

A worker sends each server its part of a gradient, while each server sends it as many bytes. No bytes are summed, and no
process waits for another one. So only the links count, and how connections share them. Rank 0 writes seconds per step.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_PIECE_BYTES = 256 << 10
_CONNECT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="")
    parser.add_argument("--servers", default="")
    parser.add_argument("--port", type=int, default=29600)
    parser.add_argument("--connections", type=int, default=0)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.listen:
        serve(args)
    else:
        work(args)


def serve(args: argparse.Namespace) -> None:
    """Answer each step of each worker with as many bytes, as soon as it begins."""
    with socket.create_server((args.listen, args.port)) as listening:
        listening.settimeout(_CONNECT_S)
        lines = [listening.accept()[0] for _ in range(args.connections)]
    together([partial(_serve_one, line, args) for line in lines])


def _serve_one(line: socket.socket, args: argparse.Namespace) -> None:
    with line:
        for _ in range(args.steps):
            begun = line.recv(1, socket.MSG_PEEK)
            assert begun, "a worker has hung up"
            together([partial(send, line, args.bytes), partial(receive, line, args.bytes)])


def work(args: argparse.Namespace) -> None:
    """All steps, with all servers at once."""
    lines = [connect(host, args.port) for host in args.servers.split(",")]
    seconds = []
    for _ in range(args.steps):
        began = time.monotonic()
        together([partial(do, line, args.bytes) for do in (send, receive) for line in lines])
        seconds.append(time.monotonic() - began)
    for line in lines:
        line.close()
    if args.out:
        args.out.write_text(json.dumps({"step_s": seconds[args.skip :]}))


def connect(host: str, port: int) -> socket.socket:
    """Connect as soon as a process listens there."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=_CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def send(line: socket.socket, nbytes: int) -> None:
    piece = bytes(min(nbytes, _PIECE_BYTES))
    for at in range(0, nbytes, _PIECE_BYTES):
        line.sendall(piece[: nbytes - at])


def receive(line: socket.socket, nbytes: int) -> None:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    while nbytes:
        got = line.recv_into(buffer, min(nbytes, _PIECE_BYTES))
        assert got, "the other end has hung up"
        nbytes -= got


def together(works: list[Callable[[], None]]) -> None:
    """Each function in a thread. Raises the error of a thread."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


if __name__ == "__main__":
    main()
