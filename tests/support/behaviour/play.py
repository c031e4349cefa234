"""Runs the text of a script: as plain torch, alone, or on a cluster of threads; what came of it."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import signal
import threading
import time
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

import paramserver
from paramserver import api as entry
from paramserver import errors, logs
from paramserver.results.verdict import broken_sentences
from paramserver.worker.context import Context
from tests.support.behaviour import plain
from tests.support.behaviour.generate import Form
from tests.support.behaviour.played import Played, found_in
from tests.support.behaviour.real import in_processes
from tests.support.cluster.harness import Cluster, Died, until

# How long a script may take on a busy machine before it counts as stuck.
SCRIPT_S = 60.0
# How long one of several workers is waited for, in turn; and all of them, when one has failed.
_LOOK_S, _OTHERS_S = 0.1, 2.0


def play_plain(text: str, form: Form, place: Path) -> Played:
    """As plain torch."""
    module, played = plain.Paramserver(form), Played()
    with found_in(place / "plain", played), quiet():
        torch.set_num_threads(1)
        try:
            execute(text, module)
        except BaseException as error:
            played.ended_with(error)
    context = module.context
    if context.models and played.error is None:
        model = context.models[0]
        played.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return played


def play(text: str, form: Form, place: Path) -> Played:
    """With the real paramserver."""
    if form.real:
        return in_processes(text, form, place)
    return on_cluster(text, form, place) if form.servers else alone(text, form, place)


def alone(text: str, form: Form, place: Path) -> Played:
    """As `python script.py` runs it."""
    played = Played()
    settings = {
        "PARAMSERVER_CONFIG": "",
        "PARAMSERVER_LOG__LEVEL": "error",
        "PARAMSERVER_RUN__SUMMARY": str(place / "summary.json"),
        "PARAMSERVER_RUN__SAVE": str(place / "weights.safetensors"),
        "PARAMSERVER_CONSISTENCY__MODE": form.mode,
        "PARAMSERVER_CONSISTENCY__STALENESS": str(form.staleness),
        "PARAMSERVER_TRAINING__SLICES_PER_STEP": str(form.slices if form.mode == "sync" else 0),
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSERVER_")}
    with mock.patch.dict(os.environ, {**kept, **settings}, clear=True), found_in(place / "alone", played), quiet():
        thread = threading.Thread(target=_alone, args=(text, played), daemon=True)
        thread.start()
        thread.join(SCRIPT_S)
        played.stuck = thread.is_alive()
    if (place / "summary.json").exists():
        played.summary = json.loads((place / "summary.json").read_text())
    if (place / "weights.safetensors").exists():
        played.weights = load_file(place / "weights.safetensors")
    return played


def _alone(text: str, played: Played) -> None:
    torch.set_num_threads(1)
    with mock.patch.object(entry, "_contexts", []), mock.patch.object(entry, "_clients", weakref.WeakSet()):
        try:
            execute(text, paramserver)
        except BaseException as error:
            played.ended_with(error)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = entry.close_all()  # as the end of the process does
        if code:
            played.code = code
            played.ended_with(errors.JobFailedError(said.getvalue()))


def on_cluster(text: str, form: Form, place: Path) -> Played:
    """In threads, on an in-memory cluster."""
    played = Played()
    options: dict[str, Any] = {"lease_s": 1.0, "grace_s": 0.2} if "SIGKILL" in text else {}
    slices = form.slices if form.mode == "sync" or form.changes else 0

    def script(ctx: Context) -> None:
        module = types.SimpleNamespace(init=lambda **settings: ctx, errors=errors)
        try:
            execute(text, module)
        except SystemExit as leave:
            if leave.code:
                ctx.engine.abandon(f"exit code {leave.code}")
                raise

    sizes = (form.workers, form.servers, form.mode, form.staleness, slices)
    with found_in(place / "cluster", played), quiet(), Cluster(*sizes, wait_timeout_s=20.0, **options) as cluster:
        logs.configure("critical")
        small: dict[str, object] = {"training__chunk_bytes": 64} if form.servers > 1 else {}
        if form.workers > 1:  # workers of a cluster compare their data
            small["cluster__coordinator"] = "somewhere:1"
        if "ps.Client()" in text:
            _client(cluster, text, played)
            return played
        workers = [cluster.start(script, small) for _ in range(form.workers)]
        deadline = time.monotonic() + SCRIPT_S
        for number, mode in enumerate(form.changes):
            change(cluster, 3 * number + 3, mode, form.staleness)
        while any(worker.alive for worker in workers) and time.monotonic() < deadline:
            for worker in workers:
                worker.end(_LOOK_S)
            if any(worker.error is not None for worker in workers):  # a launcher would end the others
                deadline = min(deadline, time.monotonic() + _OTHERS_S)
        played.stuck = all(worker.error is None for worker in workers) and any(worker.alive for worker in workers)
        for worker in sorted(workers, key=lambda w: not isinstance(w.error, errors.UserError)):
            if worker.error is not None:
                played.ended_with(worker.error)
        if broken := broken_sentences(cluster.job.coordinator.job.promises.broken):
            played.ended_with(errors.JobFailedError("; ".join(broken)))
        if not played.stuck and cluster.job.coordinator.job.registry.ready and played.error is None:
            outcome = cluster.outcome()
            outcome.result.save(place / "weights.safetensors")
            played.weights = load_file(place / "weights.safetensors")
            played.summary = outcome.summary
    return played


def _client(cluster: Cluster, text: str, played: Played) -> None:
    """A script without a context, as the job's only worker."""

    def run() -> None:
        try:
            execute(text, types.SimpleNamespace(Client=lambda: cluster.client(0)))
        except BaseException as error:
            played.ended_with(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SCRIPT_S)
    played.stuck = thread.is_alive()


def change(cluster: Cluster, version: int, mode: str, staleness: int) -> None:
    """Change the mode once the job has come to this version, unless it ends before."""

    def there() -> bool:
        ended = not any(worker.alive for worker in cluster.workers)
        return ended or min(server.version for server in cluster.stats()) >= version

    until("the job goes on", there)
    with contextlib.suppress(errors.ParamServerError):  # it may have ended by now
        cluster.set_consistency(mode, staleness, wait_s=2.0)


def execute(text: str, module: object) -> None:
    """Run the text in this thread; ``import paramserver`` gives ``module``, and whoever kills itself has died."""

    def find(name: str, *rest: Any) -> Any:
        if name == "paramserver":
            return module
        return _Os if name == "os" and module is not paramserver else __import__(name, *rest)

    own = {**vars(builtins), "__import__": find}
    exec(compile(text, "script.py", "exec"), {"__name__": "__main__", "__builtins__": own})


class _Os:
    """The module ``os`` as far as scripts use it, where a process is only a thread."""

    environ = os.environ
    path = os.path
    getpid = staticmethod(os.getpid)

    @staticmethod
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Died


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that torch has for odd scripts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
