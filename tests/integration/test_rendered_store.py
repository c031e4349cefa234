"""The store that `paramserver render k8s` describes: a real server, and the certificate that the files' head makes."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from paramserver.config import load_settings
from paramserver.machine.valkey import find_program
from paramserver.render.request import STORE_CERTIFICATE, STORE_SECRET, Request
from paramserver.render.targets import TARGETS
from paramserver.store import open_store
from paramserver.store.address import parse
from tests.support.integration.harness import ROOT, free_address

FILES = TARGETS["k8s"](Request(load_settings(ROOT / "configs/cluster.toml", environ={})))
PASSWORD = "0123456789abcdef"


def test_only_its_user_gets_in_and_may_do_no_more_than_the_coordinator_needs(tmp_path: Path) -> None:
    """The store ran as the default user, who may do everything. (The server of the tests knows no TLS.)"""
    port = free_address().rpartition(":")[2]
    password = tmp_path / "password"
    password.touch(mode=0o600)
    password.write_text(PASSWORD + "\n")
    (tmp_path / "valkey-server").symlink_to(find_program())
    objects: list[Any] = list(yaml.safe_load_all(FILES["store.yaml"]))
    (container,) = objects[1]["spec"]["template"]["spec"]["containers"]
    *shell, script = container["command"]
    assert "\nport 0\ntls-port 6379\n" in script
    lines = [line for line in script.replace("$$", "$").splitlines() if not line.startswith("tls-")]
    script = "\n".join(f"port {port}" if line == "port 0" else line for line in lines)
    script = script.replace(STORE_SECRET, str(password)).replace("--dir /data", f"--dir {tmp_path}")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    server = subprocess.Popen([*shell, script], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert any("Ready to accept connections" in line for line in server.stdout)
        assert asyncio.run(used(f"redis://paramserver@localhost:{port}/0", password)) == b"state"
        for user, given in ((None, None), (None, PASSWORD), ("paramserver", "another")):
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(port=int(port), username=user, password=given).ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            redis.Redis(port=int(port), username="paramserver", password=PASSWORD).flushall()
    finally:
        server.kill()
        server.communicate()


async def used(url: str, password: Path) -> bytes:
    """The coordinator's store, as it is written to and read."""
    store = open_store(url, "paramserver:digits", str(password))
    try:
        await store.save("record", b"state", 0)
        found = await store.load("record")
        assert found is not None
        return found.value
    finally:
        await store.close()


def test_the_coordinator_trusts_the_certificate_of_its_store_alone(tmp_path: Path) -> None:
    (url,) = re.findall(r'store = "(.*)"', FILES["config.yaml"])
    (make,) = re.findall(r"openssl req .*", FILES["config.yaml"])
    assert url.startswith("rediss://paramserver@paramserver-store:6379/")
    others = tmp_path / "others"
    others.mkdir()
    for directory in (tmp_path, others):
        subprocess.run(make, shell=True, cwd=directory, check=True, capture_output=True)
    address = parse(url.replace(STORE_CERTIFICATE, str(tmp_path / "store.crt")))
    assert address.tls is not None
    shake_hands(address.tls, tmp_path, address.host)
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed"):
        shake_hands(address.tls, others, address.host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(address.tls, tmp_path, "another-store")


def shake_hands(client: ssl.SSLContext, directory: Path, host: str) -> None:
    """Between the coordinator and a store with the certificate of this directory, which is called ``host``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "store.crt", directory / "store.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there, server_hostname=host)
    answering = context.wrap_bio(there, back, server_side=True)
    for side in (asking, answering, asking):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
