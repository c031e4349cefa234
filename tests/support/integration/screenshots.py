"""Pictures of the page of three real runs: `python -m tests.support.integration.screenshots FOLDER [SECONDS]`.

A run with a slow worker, a run in which a server dies and its backup takes over, an asynchronous run; each at the width
of a laptop and of a phone, light and dark. The best one goes into README.md.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paramserver.transport.security.tokens import Tokens
from paramserver.web.tickets import page_link
from tests.support.integration.browser import Browser

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "scripts" / "watched.py"
README_PICTURE, README_BYTES = ROOT / "docs/images/dashboard.png", 200_000
README_SIZE = (1280, 800)
# Of the runs: so the pictures' browser may read their pages.
TOKEN = secrets.token_urlsafe(32)
START_S, FIRST_S = 180.0, 3.0
SIZES = {"laptop": (1366, 900), "phone": (390, 844)}
FLEET = ("--servers", "3", "--workers", "4", "--replicas", "1", "--checkpoint-every", "100")
# By name: flags of `run`, arguments of the script.
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "straggler": (FLEET, ("--slow", "3")),
    "takeover": (FLEET, ()),
    "async": ((*FLEET, "--mode", "async", "--staleness", "4"), ("--slow", "2")),
}


def main(folder: Path, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (flags, arguments) in RUNS.items():
        with tempfile.TemporaryDirectory() as directory:
            _one(name, flags, arguments, folder, Path(directory), seconds)
    best = folder / README_PICTURE.name
    if best.stat().st_size > README_BYTES:
        raise SystemExit(f"{best} has more than {README_BYTES} bytes, so README.md keeps its picture")
    README_PICTURE.parent.mkdir(exist_ok=True)
    shutil.copy(best, README_PICTURE)
    print(f"{folder}: look at them; {README_PICTURE.relative_to(ROOT)} is new")


def _one(
    name: str, flags: tuple[str, ...], arguments: tuple[str, ...], folder: Path, directory: Path, seconds: float
) -> None:
    command = [sys.executable, "-m", "paramserver", "run", str(SCRIPT), "--job", name, *flags, "--", *arguments]
    environ = {**os.environ, "PARAMSERVER_SECURITY__TOKEN": TOKEN}
    with (directory / "out").open("wb") as out:
        run = subprocess.Popen(
            command, cwd=directory, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ
        )
    try:
        url = _address(directory / "out", run)
        _until(lambda: _status(url)["state"] == "training", run)
        time.sleep(seconds)
        if name == "takeover":
            (server,) = [one["pid"] for one in _status(url)["processes"] if one["name"] == "server-1"]
            os.kill(server, signal.SIGKILL)
            time.sleep(seconds / 4)
        with Browser(directory / "profile") as browser:
            for size, (width, height) in SIZES.items():
                for scheme in ("light", "dark"):
                    browser.open(page_link(url, Tokens([TOKEN])), width, height, scheme == "dark")
                    time.sleep(FIRST_S)
                    browser.picture(folder / f"{name}-{size}-{scheme}.png")
            if name == "straggler":
                browser.open(page_link(url, Tokens([TOKEN])), *README_SIZE)
                time.sleep(FIRST_S)
                browser.picture(folder / README_PICTURE.name, whole=False)
        print(f"{name}: {json.dumps(_status(url)['blame'])}", flush=True)
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(60.0)


def _address(out: Path, run: subprocess.Popen[bytes]) -> str:
    pattern = re.compile(r"dashboard at (http://[0-9.:]+)")
    _until(lambda: bool(pattern.search(out.read_text())), run)
    found = pattern.search(out.read_text())
    assert found is not None
    return found[1]


def _until(true: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not true():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not come to training within {START_S:g} s")
        time.sleep(0.2)


def _status(url: str) -> dict[str, Any]:
    asked = urllib.request.Request(f"{url}/api/v1/status", headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked, timeout=20.0) as answer:
        status: dict[str, Any] = json.load(answer)
        return status


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
