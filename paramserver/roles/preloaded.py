"""Program of the preloaded process: ``python -m paramserver.roles.preloaded SCRIPT ROOM FD``.

It imports what servers and workers import, and is then forked for each of them. It must not start a thread, nor touch
a GPU, nor call gRPC. ``ROOM`` makes place for longer command lines. ``FD`` is a socket to the launcher.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import socket
import sys
from collections.abc import Sequence

from paramserver.preload.chance import draw_anew
from paramserver.preload.forking import READY, obstacle, serve
from paramserver.preload.title import set_command_line
from paramserver.processes.children import die_with_parent
from paramserver.roles.scripts import OF_WORKERS

_OF_OTHERS = (
    "paramserver.roles.child",
    "paramserver.roles.serving",
    "paramserver.server.service",
    "paramserver.roles.coordinating",
    "paramserver.roles.dashboard",
    "paramserver.testing.arming",
)


def main() -> None:
    """Import, say so, and serve; a forked process goes on as the program that was asked for."""
    die_with_parent()
    script, _, number = sys.argv[1:]
    set_command_line([sys.executable, "-m", "paramserver.roles.preloaded", script])
    control = socket.socket(fileno=int(number))
    try:
        _load()
        problem = obstacle()
    except Exception as error:
        problem = f"its imports have failed ({type(error).__name__}: {error})"
    control.sendall(problem.encode()[:1000] or READY)
    if problem:
        return
    gc.collect()
    gc.freeze()  # pages stay shared: the collector does not write into these objects any more
    request = serve(control)
    if request is not None:
        _go_on(request.argv)


def _load() -> None:
    for name in (*OF_WORKERS, *_OF_OTHERS):
        importlib.import_module(name)


def _go_on(argv: Sequence[str]) -> None:
    """Be the program ``python -m paramserver.roles.child``."""
    from paramserver.roles import child
    from paramserver.transport import fork

    fork.begin_anew()
    draw_anew()
    sys.argv = [child.__file__, *argv[argv.index(child.__name__) + 1 :]]
    child.main()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
