"""The port for metrics of a server or a worker over real sockets: TLS, the token, and a port that is taken."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paramserver.config import load_settings
from paramserver.pki import certs
from paramserver.transport.security.access import Security
from paramserver.transport.security.tls import Certificates, server_name
from paramserver.transport.security.tokens import Tokens
from paramserver.v1 import coordinator_pb2
from paramserver.web.metrics.members import WORKER, worker_samples
from paramserver.web.metrics.port import MetricsPort
from paramserver.worker.background import Background

DEADLINE_S = 20.0
TOKEN = "join-token-of-the-job"
REPORT = coordinator_pb2.WorkerReport(samples=64)


@asynccontextmanager
async def port(security: Security, wanted: str = "127.0.0.1:0") -> AsyncIterator[MetricsPort]:
    settings = load_settings(overrides={"web.metrics": wanted}, environ={})
    one = MetricsPort(settings, security, WORKER, lambda: worker_samples("worker-0", REPORT))
    await one.start("127.0.0.1")
    try:
        yield one
    finally:
        await one.close()


async def ask(url: str, context: ssl.SSLContext | None = None, token: str = "", path: str = "/metrics") -> str:
    number = int(url.rpartition("/")[0].rpartition(":")[2])
    name = server_name("worker") if context else None
    bearer = f"authorization: Bearer {token}\r\n" if token else ""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", number, ssl=context, server_hostname=name)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{bearer}connection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
    return answer


def test_the_rules_are_those_of_the_first_port(tmp_path: Path) -> None:
    certs.init(tmp_path / "certs")
    context = ssl.create_default_context(cafile=tmp_path / "certs" / "ca.crt")
    security = Security("worker", Certificates(tmp_path / "certs", "worker"), Tokens([TOKEN]))

    async def story() -> None:
        async with port(security) as one:
            assert one.url.startswith("https://127.0.0.1:")
            assert "\nparamserver_worker_samples_total 64.0\n" in await ask(one.url, context, TOKEN)
            for token in ("", "wrong"):
                refused = await ask(one.url, context, token)
                assert refused.startswith("HTTP/1.1 401")
                assert "paramserver_" not in refused
            assert (await ask(one.url, context, TOKEN, "/api/v1/status")).startswith("HTTP/1.1 404")

    asyncio.run(story())


def test_a_port_of_another_process_does_not_cost_the_job_a_member() -> None:
    async def story() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            async with port(Security.open(), f"127.0.0.1:{other.getsockname()[1]}") as one:
                assert one.url == ""

    asyncio.run(story())


def test_a_worker_serves_until_it_leaves() -> None:
    """Nothing but the port itself refers to the task that closes it in the end."""
    settings = load_settings(overrides={"web.metrics": "127.0.0.1:0"}, environ={})
    background = Background()
    one = MetricsPort(settings, Security.open(), WORKER, lambda: worker_samples("worker-0", REPORT))
    background.run(one.start("127.0.0.1"))
    background.submit(one.until_cancelled())
    assert "paramserver_worker_samples_total 64.0" in asyncio.run(ask(one.url))
    gc.collect()
    assert "paramserver_worker_samples_total 64.0" in asyncio.run(ask(one.url))
    background.close()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        asyncio.run(ask(one.url))
