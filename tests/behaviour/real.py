"""Runs a script with `paramserver run`: real processes, some of which are killed while they train."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from paramserver import errors
from tests.behaviour.generate import Form
from tests.behaviour.played import Played, found_in
from tests.integration.harness import Done, Place, Running, read_summary, until

# The line with which a run says that it has kept its word.
KEPT = "everything promised is there"
# Between a death and the next one.
_APART_S = 0.7


def in_processes(text: str, form: Form, place: Path) -> Played:
    """On this machine, with processes of its own."""
    played = Played()
    script, summary, weights = place / "script.py", place / "summary.json", place / "weights.safetensors"
    script.write_text(text)
    flags = {
        "--servers": form.servers,
        "--workers": form.workers,
        "--mode": form.mode,
        "--staleness": form.staleness,
        "--slices-per-step": form.slices if form.mode == "sync" else 0,
        "--summary": summary,
        "--save": weights,
        "--checkpoint-dir": place / "checkpoints",
        "--checkpoint-every": 4,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    with found_in(place / "found", played), Place() as where:
        running = where.launch("run", script, *words, environ={"FOUND": str(place / "found"), "OMP_NUM_THREADS": "1"})
        for number, role in enumerate(form.kills):
            if number:
                time.sleep(_APART_S)
            _kill(where, running, role, place)
        _tell(played, running.wait())
    if not played.code:
        played.weights, played.summary = load_file(weights), read_summary(summary)
    return played


def _kill(where: Place, running: Running, role: str, place: Path) -> None:
    """Kill -9 a process of this role once somebody trains."""
    until("somebody trains", lambda: running.ended or list(place.glob("found-*-begun")), 60.0)

    def of_role() -> list[int]:
        words = f"paramserver.local.roles {role}"
        return [pid for pid, line in where.processes().items() if words in line and sys.executable in line]

    until(f"there is a {role}", lambda: running.ended or of_role(), 30.0)
    assert not running.ended, f"it was over before a {role} could be killed\n{running.out}\n{running.err}"
    os.kill(max(of_role()), signal.SIGKILL)


def _tell(played: Played, done: Done) -> None:
    """Take down how the command ended."""
    played.code, played.where = done.code, done.text
    said = re.search(r"paramserver: error: (.*)", done.said)
    if done.code == errors.UserError.exit_code and said and "Traceback" not in done.said:
        played.error = errors.UserError(said[1])
    elif done.code:
        played.error = RuntimeError(done.text)
    elif KEPT not in done.said:
        played.code, played.error = -1, AssertionError(f"it does not say: {KEPT}\n{done.text}")
