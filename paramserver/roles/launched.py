"""The process that has the function of ``paramserver.launch``. It is forked of the caller, and forked for each worker.

A fork has one thread only, and the memory of the caller: its functions, its data. What belongs to the caller alone is
left alone: its functions for the end of Python, and what its open files hold back.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import io
import json
import os
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from paramserver import errors, logs
from paramserver.preload.chance import draw_anew
from paramserver.preload.forking import serve
from paramserver.processes import environment as env
from paramserver.processes.children import die_with_parent
from paramserver.processes.ends import end_as_python

RESULT, FAILURE = "result", "failure"


@dataclass(frozen=True, slots=True)
class Function:
    """What each worker calls, and the directory for what comes of it."""

    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    directory: Path

    @property
    def name(self) -> str:
        """For people."""
        return getattr(self.call, "__name__", type(self.call).__name__)

    @property
    def file(self) -> str:
        """The file of its code, as it stands in tracebacks."""
        code = getattr(self.call, "__code__", None)
        return code.co_filename if code is not None else ""

    def run(self) -> None:
        """Call it. Its value, or its error, goes to the directory."""
        index = os.environ.get(env.ENV_INDEX, "0")
        try:
            value = self.call(*self.args, **self.kwargs)
        except Exception as error:
            trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
            lines = traceback.format_exception(type(error), error, trace)
            found = {"worker": f"worker-{index}", "error": f"{type(error).__name__}: {error}", "trace": "".join(lines)}
            self._keep(f"{FAILURE}-{index}", json.dumps(found).encode())
            raise
        from paramserver import api as entry
        from paramserver.worker.data.values import encode

        if not entry.is_main_here(index):
            return
        try:
            self._keep(RESULT, encode(value))
        except errors.UserError:
            logs.say(
                f"paramserver: what {self.name} returned ({type(value).__name__}) does not travel to the caller of "
                "launch: return numbers, texts and tensors of at most 1 MiB, in lists, tuples and dicts"
            )

    def _keep(self, name: str, data: bytes) -> None:
        whole = self.directory / f"{name}.{os.getpid()}"
        whole.write_bytes(data)
        whole.rename(self.directory / name)


def become_template(function: Function, control: socket.socket, launcher: int) -> NoReturn:
    """Be forked for each request that comes through ``control``; ``launcher``: the pid of this process's parent."""
    code = 1
    try:
        os.setsid()
        die_with_parent(launcher)
        _forget_the_caller()
        kept = [one for one in gc.get_objects() if type(one) in _FILES]
        sys.stdin = open(os.devnull)  # noqa: SIM115  # as long as this process
        sys.stdout, sys.stderr = (open(fd, "w", 1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        gc.freeze()
        if serve(control) is not None:
            _work(function, kept)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# Files of the caller's: their bytes are written by the caller.
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def _forget_the_caller() -> None:
    """This process ends without what the caller has registered for its own end."""
    atexit._clear()
    finalize = cast(Any, weakref.finalize)
    for one in list(finalize._registry):
        one.atexit = False
    finalize._registered_with_atexit = False  # those to come
    asyncio._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


def _work(function: Function, kept: Sequence[object]) -> NoReturn:
    """Be a worker."""
    from paramserver.roles import child
    from paramserver.transport import fork

    fork.begin_anew()
    draw_anew()
    logs.begin_anew()
    child.work(function, kept)
    end_as_python(0, kept)
