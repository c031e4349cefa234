"""Calls of stock gRPC from one of the machines, for what our own client would not do; also the program that does it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.membership.joining import versions
from paramserver.transport.base import METHODS
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import PROTOCOL
from tests.support.contract.trust import bearer, stock
from tests.support.integration.harness import ROOT
from tests.support.machines.cluster import Cluster

CALL_S = 15.0
# trust, identity: directories with certificates, "" for none; role: of the certificate; token: what is shown, or "".
Case = Mapping[str, str]


def ask(
    cluster: Cluster, machine: str, cases: Sequence[Case], environ: Mapping[str, str] | None = None
) -> list[dict[str, str]]:
    """The ``code`` and ``details`` with which each of the cases ends when it asks to join as a worker.

    "own" and "right" stand for what is on the machine; ``environ``: more variables, such as a proxy.
    """
    own = cluster.site.trust(machine, "worker")
    known = {"own": str(own), "right": (own / "join.token").read_text().strip()}
    full = [{name: known.get(value, value) for name, value in case.items()} for case in cases]
    words = cluster.network.inside(machine, sys.executable, str(Path(__file__).resolve()), cluster.join, cluster.job)
    cases_file = own.parent / "cases.json"  # not an argument, which everybody could read
    cases_file.touch(mode=0o600)
    cases_file.write_text(json.dumps(full))
    done = cluster.site.place.start(*words, str(cases_file), environ=environ).wait().check()
    found = json.loads(done.out)
    assert len(found) == len(cases)
    return list(found)


async def _answer(address: str, job: str, case: Case) -> dict[str, str]:
    from paramserver.transport.grpcio import grpc

    identity = (Path(case["identity"]), case.get("role", "worker")) if case["identity"] else None
    request = coordinator_pb2.JoinRequest(
        job=job, role=types_pb2.ROLE_WORKER, protocol=PROTOCOL, versions=versions(), incarnation=1
    )
    method = METHODS["Coordinator.Join"]
    async with stock(address, Path(case["trust"]), identity) as channel:
        call: Any = channel.unary_unary(method.path)
        try:
            metadata = bearer(case["token"]) if case["token"] else ()
            await call(request.SerializeToString(), metadata=metadata, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return {"code": error.code().name, "details": error.details() or ""}
    return {"code": "OK", "details": ""}


async def main() -> None:
    address, job, file = sys.argv[1:]
    cases: list[Case] = json.loads(Path(file).read_text())
    print(json.dumps(list(await asyncio.gather(*(_answer(address, job, case) for case in cases)))))


if __name__ == "__main__":
    assert str(ROOT) in sys.path
    asyncio.run(main())
