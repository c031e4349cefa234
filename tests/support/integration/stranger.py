"""Another user of the machine: tries everything that it could want of a job, and says what it was not refused.

``python stranger.py < wishes.json``. As root it becomes the user nobody before it tries anything. Another user has no
second one, and tries the calls only, without the files in which the token lies.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # the files of Python may be out of reach later
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from paramserver.transport.base import METHODS
from paramserver.v1.shard_pb2 import ReleaseRequest

NOBODY = 65534
PATHS = ("/api/v1/status", "/api/v1/settings", "/api/v1/events", "/api/v1/ledger", "/api/v1/stream", "/metrics")


def main(wishes: dict[str, list[str]]) -> list[str]:
    """``coordinators``, ``servers``: addresses. ``pages``: URLs. ``files``, ``sockets``: paths. ``pids``: processes."""
    tried: list[tuple[str, Callable[[], Any]]] = [
        *_calls("Coordinator", wishes["coordinators"]),
        *_calls("Shard", wishes["servers"]),
    ]
    for page in wishes["pages"]:
        tried += [(page + path, partial(_get, page + path)) for path in PATHS]
        tried.append((f"stop {page}", partial(_post, f"{page}/api/v1/stop")))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        private = [f"/proc/{pid}/{name}" for pid in wishes["pids"] for name in ("environ", "maps", "mem", "fd/0")]
        tried += [(path, Path(path).read_bytes) for path in (*wishes["files"], *private)]
        tried += [(path, partial(_connect, path)) for path in wishes["sockets"]]
    return [what for what, attempt in tried if not _refused(attempt)]


def _refused(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    except grpc.RpcError as error:
        return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    except urllib.error.HTTPError as error:
        return error.code == 401
    return False


def _calls(service: str, addresses: Iterable[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every call of a service. The one that would end the job has the number with which that was done."""
    release = ReleaseRequest(term=2**62).SerializeToString()
    for address in addresses:
        channel = grpc.insecure_channel(address)
        for name, method in METHODS.items():
            if name.startswith(f"{service}."):
                message = release if name == "Shard.Release" else b""
                yield f"{name} at {address}", partial(_call, channel, method.path, message)


def _call(channel: grpc.Channel, path: str, message: bytes) -> None:
    call: Any = channel.stream_stream(path)
    next(call(iter([message]), timeout=20.0))


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20.0) as answer:
        return bytes(answer.read(1))


def _post(url: str) -> bytes:
    asked = urllib.request.Request(url, data=b"{}", headers={"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20.0) as answer:
        return bytes(answer.read(1))


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
