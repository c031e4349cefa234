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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from paramserver.transport.base import METHODS
from paramserver.v1.shard_pb2 import ReleaseRequest

NOBODY = 65534
PATHS = ("/api/v1/status", "/api/v1/settings", "/api/v1/events", "/api/v1/ledger", "/api/v1/stream", "/metrics")


def main(wishes: dict[str, list[str]]) -> list[str]:
    """``coordinators``, ``servers``: addresses. ``pages``: URLs. ``files``, ``sockets``: paths. ``pids``: processes."""
    tried = list(_calls("Coordinator", wishes["coordinators"])) + list(_calls("Shard", wishes["servers"]))
    tried += [
        (page + path, lambda page=page, path=path: _get(page + path)) for page in wishes["pages"] for path in PATHS
    ]
    tried += [(f"stop {page}", lambda page=page: _post(f"{page}/api/v1/stop")) for page in wishes["pages"]]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        tried += [(path, lambda path=path: Path(path).read_bytes()) for path in wishes["files"]]
        tried += [(path, lambda path=path: _connect(path)) for path in wishes["sockets"]]
        private = ("environ", "maps", "mem", "fd/0")
        tried += [
            (path, lambda path=path: Path(path).read_bytes())
            for path in (f"/proc/{pid}/{name}" for pid in wishes["pids"] for name in private)
        ]
    return [what for what, attempt in tried if not _refused(attempt)]


def _refused(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    except urllib.error.HTTPError as error:
        return error.code == 401
    return False


def _calls(service: str, addresses: Iterable[str]) -> Iterable[tuple[str, Callable[[], Any]]]:
    """Every call of a service. The one that would end the job has the number with which that was done."""
    release = ReleaseRequest(term=2**62).SerializeToString()
    for address in addresses:
        channel = grpc.insecure_channel(address)
        for name, method in METHODS.items():
            if name.startswith(f"{service}."):
                message = release if name == "Shard.Release" else b""
                call = channel.stream_stream(method.path)
                yield f"{name} at {address}", lambda call=call, raw=message: next(call(iter([raw]), timeout=20.0))


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
