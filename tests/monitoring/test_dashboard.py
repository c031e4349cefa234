"""A real Prometheus watches a real job: every query of the dashboard for Grafana has an answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.config import load_settings
from paramserver.render.request import Request
from paramserver.render.targets import WATCHING
from tests.support.integration.harness import Place, free_address, place_fixture, until

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "monitoring" / "grafana" / "dashboards" / "paramserver.json"
SCRIPT = """
import time, torch, paramserver as ps
from torch.utils.data import DataLoader, TensorDataset
with ps.init() as ctx:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(80000, 8), torch.randn(80000, 1)), batch_size=8)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for _ in ctx.epochs(1):
        for x, y in loader:
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            ctx.log(loss=loss.item())
            time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def queries() -> list[tuple[str, str]]:
    """The panels of the dashboard, and their queries."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]


class Prometheus:
    """The server, with the files that ``paramserver render monitoring`` writes. It looks every second."""

    def __init__(self, directory: Path, dashboard: str, token_file: Path) -> None:
        overrides: dict[str, object] = {"web.dashboard": dashboard, "cluster.coordinator": dashboard}
        overrides |= {"security.insecure": True, "security.token_file": str(token_file)}
        for name, text in WATCHING["monitoring"](Request(load_settings(overrides=overrides, environ={}))).items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text.replace("15s", "1s"))
        self._address = free_address()
        program = shutil.which("prometheus")
        assert program is not None, "there is no prometheus: install it (on Debian the package prometheus)"
        self._process = subprocess.Popen(
            [
                program,
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                f"--web.listen-address={self._address}",
            ],
            cwd=directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, query: str) -> list[Any]:
        """The answer to a query; none while the server begins."""
        url = f"http://{self._address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10.0) as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
                return found
        except (urllib.error.URLError, ConnectionError):
            return []

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.timeout(180.0)
def test_every_query_of_the_dashboard_has_an_answer(place: Place, tmp_path: Path) -> None:
    script = place.work / "train.py"
    script.write_text(SCRIPT)
    token_file = tmp_path / "join.token"
    token_file.touch(mode=0o600)
    token_file.write_text("a-token-for-prometheus\n")
    sizes = ("--servers", "2", "--workers", "2", "--replicas", "1", "--mode", "async", "--staleness", "2")
    run = place.launch("run", script, *sizes, "--metrics", "127.0.0.1:0", "--set", f"security.token_file={token_file}")
    run.wait_for(r"dashboard at http://127\.0\.0\.1:\d+")
    found = re.search(r"dashboard at http://([0-9.:]+)", run.out)
    assert found is not None
    assert len(queries()) > 20
    with Prometheus(tmp_path, found[1], token_file) as prometheus:
        for title, query in queries():
            until(f"{title}: {query}", lambda query=query: prometheus.ask(query), 60.0)  # type: ignore[misc]
        processes = {one["metric"]["process"] for one in prometheus.ask("paramserver_member == 1")}
        assert processes == {"server-0", "server-1", "worker-0", "worker-1"}
    place.paramserver("stop").check()
    run.wait()
