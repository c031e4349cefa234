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
from tests.support.behaviour.generate import Form
from tests.support.behaviour.played import Played, found_in
from tests.support.integration.harness import Done, Place, Running, read_summary, until

# The line with which a run says that it has kept its word.
KEPT = "everything promised is there"
# Between a death and the next one.
_APART_S = 0.7


def in_processes(text: str, form: Form, place: Path) -> Played:
    """On this machine, with processes of its own."""
    played = Played()
    with found_in(place / "found", played), Place() as where:
        run = Run(where, text, form, place)
        running = run.start()
        for number, role in enumerate(form.kills):
            if number:
                time.sleep(_APART_S)
            run.kill(running, role)
        if form.again == "resume":
            run.trains(running)
            time.sleep(_APART_S)
            running.send(signal.SIGTERM)
        done = running.wait()
        if form.again:
            done = run.again(done)
        _tell(played, done)
    if not played.code:
        played.weights, played.summary = load_file(run.weights), read_summary(run.summary)
    return played


class Run:
    """A script, the files that its runs write, and its runs."""

    def __init__(self, where: Place, text: str, form: Form, place: Path) -> None:
        self.summary, self.weights = place / "summary.json", place / "weights.safetensors"
        self._where, self._form, self._place = where, form, place
        self._script, self._checkpoints = place / "script.py", place / "checkpoints"
        self._script.write_text(text)

    def start(self, *flags: str | Path) -> Running:
        """Run the script, or with ``--resume`` what was stopped."""
        form = self._form
        numbers = {
            "--servers": form.servers,
            "--workers": form.workers,
            "--mode": form.mode,
            "--staleness": form.staleness,
            "--slices-per-step": form.slices if form.mode == "sync" else 0,
            "--checkpoint-dir": self._checkpoints,
            "--checkpoint-every": 10_000 if form.late else 4,
        }
        words = [str(word) for pair in numbers.items() for word in pair] if "--resume" not in flags else []
        script = [self._script] if "--resume" not in flags else []
        environ = {"FOUND": str(self._place / "found"), "OMP_NUM_THREADS": "1"}
        files = ("--summary", self.summary, "--save", self.weights)
        return self._where.launch("run", *script, *words, *files, *flags, environ=environ)

    def again(self, first: Done) -> Done:
        """Run it a second time, as the form says; the outcome to be judged."""
        if self._form.again == "resume":
            assert first.code == 128 + signal.SIGTERM, f"it was over before it could be stopped\n{first.text}"
            return self.start("--resume", self._checkpoints).wait()
        first.check()
        before = self._listing()
        if self._form.again == "fresh":
            return self.start("--fresh").wait()
        second = self.start().wait()
        assert second.code == errors.UserError.exit_code, f"a used directory is taken\n{second.text}"
        assert [flag for flag in ("--resume", "--fresh") if flag not in second.said] == [], second.text
        assert self._listing() == before, "a run that is refused changes nothing"
        return first

    def _listing(self) -> dict[str, bytes]:
        files = [path for path in sorted(self._checkpoints.rglob("*")) if path.is_file()]
        assert files
        return {str(path.relative_to(self._checkpoints)): path.read_bytes() for path in files}

    def trains(self, running: Running) -> None:
        """Wait until somebody trains."""
        begun = f"found-*-begun-{int(self._form.late)}"
        until("somebody trains", lambda: running.ended or list(self._place.glob(begun)), 60.0)

    def kill(self, running: Running, role: str) -> None:
        """Kill -9 a process of this role once somebody trains."""
        self.trains(running)

        def of_role() -> list[int]:
            words = f"paramserver.roles.child {role}"
            return [pid for pid, line in self._where.processes().items() if words in line and sys.executable in line]

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
