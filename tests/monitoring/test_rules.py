"""The files for Prometheus, as its own tool reads them: they are valid, and alerts fire when they are to fire."""

from __future__ import annotations

import subprocess
from pathlib import Path

from paramserver.config import load_settings
from paramserver.render.request import Request
from paramserver.render.targets import WATCHING

ROOT = Path(__file__).parents[2]


def promtool(*tokens: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, tokens)], capture_output=True, text=True, timeout=60)


def test_the_configuration_and_the_rules_are_valid(tmp_path: Path) -> None:
    for name in ("ca.crt", "join.token"):
        (tmp_path / name).write_text("x")
    overrides = {"security.certs": str(tmp_path), "cluster.coordinator": "a:8790,b:8790"}
    for name, text in WATCHING["monitoring"](Request(load_settings(overrides=overrides, environ={}))).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_are_to_fire() -> None:
    done = promtool("test", "rules", ROOT / "tests/monitoring/alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_expectation_is_seen(tmp_path: Path) -> None:
    text = (ROOT / "tests/monitoring/alerts.yml").read_text()
    text = text.replace("../../deploy", str(ROOT / "deploy")).replace("instance: held", "instance: fine")
    (tmp_path / "alerts.yml").write_text(text)
    assert promtool("test", "rules", tmp_path / "alerts.yml").returncode == 1
