"""Program of the launcher's children: ``python -m paramserver.roles.child coordinator|server|worker SCRIPT ...``.

Their settings come in the environment, put there by the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from types import TracebackType
from typing import NoReturn, Protocol

from paramserver import errors, logs
from paramserver.config import Settings, load_settings
from paramserver.processes import environment as env
from paramserver.processes.children import die_with_parent
from paramserver.processes.ends import end_as_python, listen
from paramserver.roles.scripts import Script
from paramserver.testing.arming import arm_if_told

TERMINATED = 143
# What torch and scripts complain of where nobody has told them their rank.
_RANKS = re.compile(
    r"\b((LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b|process group has not been initialized"
    r"|[Uu]nknown .*backend.* paramserver"
)
_SAY_DDP = (
    "paramserver: a script of torch.distributed is told its rank only by paramserver run --ddp SCRIPT. "
    "A script that calls paramserver.init needs neither --ddp nor DistributedDataParallel"
)
# Not a real exit code: the job has ended.
_ENDED = -1


def main() -> None:
    """Run the role that the first argument names."""
    die_with_parent()
    role, *rest = sys.argv[1:]
    settings = load_settings()
    # The launcher shows the lines, behind the name of this process.
    form = "json" if settings.log.format == "json" else "text"
    logs.configure(settings.log.level, form, role, launched=True)
    arm_if_told(role if role == "coordinator" else f"{role}-{os.environ.get(env.ENV_INDEX, '0')}")
    if role == "worker":
        run_worker(Script(rest))
        return
    try:
        sys.exit(asyncio.run(run_coordinator(settings) if role == "coordinator" else run_server(settings)))
    except errors.ParamServerError as error:
        logs.complain(f"paramserver: error: {error}")
        sys.exit(error.exit_code)


def _stopped() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    listen(lambda number: stop.set())
    return stop


async def run_coordinator(settings: Settings) -> int:
    """Lead the launcher's job until told to stop; says its address, and that of its dashboard, on ENV_READY_FD.

    ENV_FORMER names an ended predecessor: then the coordinator takes over the predecessor's lease and record.
    """
    from paramserver.pki.security import load_security
    from paramserver.resume.options import Options
    from paramserver.roles.coordinating import Coordinating
    from paramserver.roles.dashboard import Dashboard
    from paramserver.store import open_store
    from paramserver.transport import bulk, grpc
    from paramserver.transport.addresses import join, own_loopback

    job = settings.cluster.job
    url = os.environ.pop(env.ENV_STORE)
    security = load_security(settings, "coordinator")
    former = os.environ.get(env.ENV_FORMER, "")
    options = Options(
        resume=bool(former),
        standby=bool(former),
        gather=False,
        token=os.environ.get(env.ENV_LEADER, ""),
        former=former,
        fresh=bool(os.environ.get(env.ENV_FRESH)) and not former,
        histories=tuple(json.loads(os.environ[env.ENV_HISTORIES])),
        private=bool(os.environ.get(env.ENV_PRIVATE)),
    )
    coordinating = Coordinating(
        settings,
        options,
        lambda: open_store(url, f"paramserver:{job}"),
        os.environ.get(env.ENV_STORE_NAME, ""),
        security,
        bulk.connector(security, "server", settings.cluster.transport != "grpc"),
    )
    listen(coordinating.on_signal)
    host, _, port = (settings.cluster.coordinator or join(own_loopback(), 0)).rpartition(":")
    server = await grpc.serve([("Coordinator", coordinating.endpoint)], host.strip("[]"), int(port), security)
    coordinating.address = server.address
    dashboard = Dashboard(settings, security, coordinating.endpoint)
    try:
        await dashboard.start(own_loopback(), again=bool(former))
        coordinating.dashboard, coordinating.show_end = dashboard.url, dashboard.show_end
        code = await coordinating.run(lambda: _say_ready(f"{server.address} {dashboard.url}"))
    finally:
        await dashboard.close()
        await server.stop(0.2)
    return 0 if code > 128 else code


async def run_server(settings: Settings) -> int:
    """Hold a shard until told to stop, or until the shard fails (exit code 1)."""
    from paramserver.pki.security import load_security
    from paramserver.roles.serving import Serving
    from paramserver.transport.addresses import own_loopback
    from paramserver.transport.grpc import connector

    stop = _stopped()
    security = load_security(settings, "server")
    coordinator = connector(security, "coordinator")(settings.cluster.coordinator)
    serving = Serving(settings, security, coordinator, int(os.environ.get(env.ENV_INDEX, "0")))
    await serving.run(own_loopback(), 0, own_loopback(), stop)
    return 0


def _say_ready(addresses: str) -> None:
    if fd := os.environ.get(env.ENV_READY_FD):
        with open(int(fd), "w") as pipe:
            pipe.write(addresses + "\n")


def work(program: Program, apart: Collection[object]) -> None:
    """Be a worker that runs this program, in a process that was forked for this."""
    settings = load_settings()
    logs.configure(settings.log.level, "json" if settings.log.format == "json" else "text", "worker", launched=True)
    arm_if_told(f"worker-{os.environ.get(env.ENV_INDEX, '0')}")
    run_worker(program, apart=apart)


class Program(Protocol):
    """What a worker runs. ``file`` has its code."""

    @property
    def file(self) -> str: ...

    def run(self) -> None:
        """Run it to its end."""


def run_worker(
    program: Program, at_end: Callable[[int], None] = lambda code: None, apart: Collection[object] = ()
) -> None:
    """Run a training script as plain Python would, with errors told as its user expects them.

    On SIGTERM the worker gives back what it has not handed in, and leaves (exit code 143). With another exit code than
    0 this process ends here, as Python ends a script; ``at_end`` is called with the code before. ``apart``: files that
    are not this process's own.
    """
    code, failure = 0, ""
    signal.signal(signal.SIGTERM, _leave_on_signal)
    if env.ENV_INDEX in os.environ:  # the launcher hands Ctrl-C on, also if it was started with SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _leave_after_all
    if env.ENV_TERMINAL in os.environ:
        sys.stdin = _NoInput()
    try:
        if env.ENV_RANKS in os.environ:
            become_rank()
        program.run()
    except SystemExit as leave:
        code = _exit_code(leave)
        failure = f"exit code {code}" if code not in (0, TERMINATED) else ""
    except errors.EndedError as error:
        logs.complain(f"paramserver: {error}")
        code = _ENDED
    except errors.ParamServerError as error:
        logs.complain(f"paramserver: error: {error}{_where(error.__traceback__, program.file)}")
        code, failure = error.exit_code, str(error)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # the top of the process: shown in full, from the script on
        logs.show_exception(error, _from_script(error.__traceback__, program.file))
        if env.ENV_RANKS not in os.environ and asks_for_ranks(error):
            logs.complain(_SAY_DDP)
        code, failure = 1, f"{type(error).__name__}: {error}"
    # The script has ended. The rest takes a moment, and must not be interrupted in the middle of an import.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.unraisablehook = sys.__unraisablehook__
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if code:
        # Nothing more is handed in: the other workers get the slices that are left.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _abandon(failure)
        at_end(0 if code == _ENDED else code)
        end_as_python(0 if code == _ENDED else code, apart)


class _NoInput(io.TextIOBase):
    """Standard input of a worker whose launcher has a terminal: reading fails."""

    def _refuse(self, *_: object) -> NoReturn:
        raise errors.UserError(
            "the workers of a run cannot read what a person types: give the script arguments after --, or a file or "
            "pipe as standard input, as in: paramserver run SCRIPT < FILE"
        )

    read = readline = _refuse
    buffer = property(_refuse)


def become_rank() -> None:
    """Tell the script its rank as torchrun does, and torch the backend "paramserver"."""
    import paramserver.distributed  # noqa: F401  # makes the backend known
    from paramserver.transport.addresses import own_loopback

    port, size = os.environ[env.ENV_RANKS].split()
    rank = os.environ[env.ENV_INDEX]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": own_loopback(), "MASTER_PORT": port}


def asks_for_ranks(error: BaseException) -> bool:
    """Whether this is the error of a script of torch.distributed that was not told its rank.

    >>> asks_for_ranks(KeyError("LOCAL_RANK"))
    True
    """
    return isinstance(error, AssertionError | KeyError | RuntimeError | ValueError) and bool(_RANKS.search(str(error)))


def _leave_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _leave_after_all(unraisable: sys.UnraisableHookArgs) -> None:
    """The signal came in a place where Python drops exceptions, such as a finaliser: leave a moment later."""
    if not isinstance(unraisable.exc_value, SystemExit):
        sys.__unraisablehook__(unraisable)
        return
    signal.signal(signal.SIGALRM, lambda number, frame: _leave_on_signal(signal.SIGTERM, frame))
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def _abandon(failure: str) -> None:
    """Leave the job at once, if the script has joined it."""
    if "paramserver.api" in sys.modules:
        from paramserver import api as entry

        with contextlib.suppress(Exception):  # nobody may be there to hear it
            entry.abandon_all(failure)


def _exit_code(leave: SystemExit) -> int:
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    logs.complain(str(leave.code))
    return 1


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback from the script on; None if the script did not even begin."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def _where(trace: TracebackType | None, script: str) -> str:
    """The line of the script that raised the error, in words."""
    lines = [step.lineno for step in traceback.extract_tb(trace) if step.filename == script]
    return f" ({script}, line {lines[-1]})" if lines else ""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
