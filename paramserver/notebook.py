"""``paramserver.launch``: a job whose workers call a function of this process, for notebooks and programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paramserver import errors
from paramserver.config import Settings, load_settings
from paramserver.processes.children import die_with_parent
from paramserver.processes.environment import ENV_INDEX
from paramserver.processes.starting import python

_PROGRAM = "paramserver.cli.train.function"
_ERROR = "paramserver: error: "


@dataclass(frozen=True, slots=True)
class Launched:
    """What has become of a job. ``value``: what the function returned in the main worker, without pickle.

    Numbers, texts, tensors and arrays travel, and lists, tuples and dicts of them, up to 1 MiB; otherwise it is None.
    ``summary``: what ``paramserver run --summary`` writes, empty if nothing was trained.

    >>> job = Launched(value={"loss": 0.25}, summary={"steps": 8})
    >>> job.value["loss"], job.summary["steps"]
    (0.25, 8)
    """

    value: Any
    summary: Mapping[str, Any]


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int | None = None,
    servers: int | None = None,
    fresh: bool = False,
    config: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> Launched:
    """Train on a cluster on this machine whose workers call ``function(*args, **kwargs)``, and wait for the end.

    For notebooks, and for programs that train as a part of their work. The function does what a script of ``paramserver
    run`` does: it calls :func:`init`, and trains. It may be defined in a cell. Coordinator and servers are processes
    of their own. Workers are forked of this process, so that they have its functions and data as they are now; what
    they change there is lost. Their output, and the address of the job's page, appear here.

    ``workers``, ``servers``: how many. ``config`` and ``overrides``: settings, as for :func:`init`. ``fresh``: begin
    anew in a directory that has checkpoints. Ctrl-C, or the notebook's button, is a KeyboardInterrupt in the function.

    Raises JobFailedError if a worker fails, with its traceback, or if the job breaks a promise; ConfigError for
    settings that are wrong, and where a fork could not work: CUDA is in use in this process, this process was a member
    of another job, or ``training.threads_per_worker`` is above 1.

    >>> def train(epochs):
    ...     ctx = ps.init()
    ...     model = torch.nn.Linear(4, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ...     model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    ...     for _ in ctx.epochs(epochs):
    ...         for x, y in loader:
    ...             F.mse_loss(model(x), y).backward()
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    ...     return {"version": ctx.version}
    >>> data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    >>> job = ps.launch(train, args=(2,), workers=4)
    >>> list(job.value), job.summary["epochs"]
    (['version'], 2)
    """
    counts = {"cluster.workers": workers, "cluster.servers": servers}
    given = {name.replace("__", "."): value for name, value in overrides.items()}
    given |= {name: count for name, count in counts.items() if count is not None}
    _refuse(function, load_settings(Path(config) if config is not None else None, given))
    from paramserver.roles.launched import FAILURE, RESULT, Function
    from paramserver.worker.data.values import decode

    with tempfile.TemporaryDirectory(prefix="paramserver-launch-") as name:
        called = Function(function, args, kwargs or {}, Path(name))
        words = {
            "config": str(config) if config is not None else None,
            "overrides": given,
            "name": called.name,
            "fresh": fresh,
            "directory": name,
        }
        code, complaint = _run(called, words)
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        failures = sorted(called.directory.glob(f"{FAILURE}-*[0-9]"), key=lambda path: path.stat().st_mtime_ns)
        if code and failures:
            found = json.loads(failures[0].read_text())
            raise errors.JobFailedError(f"{found['worker']} failed: {found['error']}\n\n{found['trace']}")
        if code:
            kind = errors.ConfigError if code == errors.ConfigError.exit_code else errors.JobFailedError
            raise kind(complaint or f"the job has ended with exit code {code}: the lines above say why")
        result, summary = called.directory / RESULT, called.directory / "summary"
        return Launched(
            decode(result.read_bytes()) if result.exists() else None,
            json.loads(summary.read_text()) if summary.exists() else {},
        )


def _refuse(function: Callable[..., Any], settings: Settings) -> None:
    """Raise ConfigError where no job can begin, or no worker can be forked."""
    if not callable(function):
        raise errors.ConfigError(f"launch takes a function, not {function!r}: name it without calling it")
    if ENV_INDEX in os.environ:
        raise errors.ConfigError("a worker of a job has called launch: call it in a program that trains nothing itself")
    if settings.training.threads_per_worker > 1:
        raise errors.ConfigError(
            f"training.threads_per_worker is {settings.training.threads_per_worker}, but forked workers compute with "
            "one thread each, since threads of this process do not go with them: start more workers, or save the "
            "function as a script, and say paramserver run"
        )
    torch, fork = sys.modules.get("torch"), sys.modules.get("paramserver.transport.fork")
    if torch is not None and torch.cuda.is_initialized():
        raise errors.ConfigError(
            "CUDA is in use in this process already, and cannot be used in processes that are forked of it: restart "
            "the notebook, and touch the GPU in the function only"
        )
    if fork is not None and fork.used():
        raise errors.ConfigError(
            "this process was a member of a job, and its connections cannot go with forked workers: restart the "
            "notebook, and call ps.init or ps.Client in the function only"
        )


def _run(function: Any, words: Mapping[str, Any]) -> tuple[int, str]:
    """Run the job; the exit code of its launcher, and the last error that the launcher has told."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads; `_refuse` has looked
        pid, caller = 0, os.getpid()
        pid = os.fork()
    if pid == 0:
        _become_launcher(function, words, writing, caller)
    os.close(writing)
    complaint = ""
    for line in _lines(reading, pid):
        print(line, flush=True)
        if _ERROR in line:
            complaint = line.partition(_ERROR)[2]
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), complaint


def _lines(pipe: int, pid: int) -> Iterator[str]:
    """What the launcher says. An interruption is handed on to the launcher, which ends the job."""
    with open(pipe, errors="replace") as file:
        while True:
            try:
                line = file.readline()
                if not line:
                    return
                yield line.rstrip("\n")
            except KeyboardInterrupt:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)


def _become_launcher(function: Any, words: Mapping[str, Any], writing: int, caller: int) -> NoReturn:
    """In the forked process: fork the process that has the function, and become the launcher of its job."""
    try:
        os.setsid()
        die_with_parent(caller)
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, target in ((null, 0), (writing, 1), (writing, 2)):
            os.dup2(fd, target)
        os.close(writing)
        launcher = os.getpid()
        if os.fork() == 0:
            from paramserver.roles.launched import become_template

            ours.close()
            become_template(function, its, launcher)
        its.close()
        os.set_inheritable(ours.fileno(), True)
        argv = [*python(_PROGRAM), json.dumps({**words, "control": ours.fileno()})]
        os.execve(argv[0], argv, {**os.environ, "PYTHONUNBUFFERED": "1"})
    except BaseException as error:
        os.write(2, f"{_ERROR}the launcher cannot be started: {error}\n".encode())
    finally:
        os._exit(1)
