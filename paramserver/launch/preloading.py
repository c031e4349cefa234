"""The preloaded processes of `paramserver run`: one for each environment that its children have, mostly one in all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from paramserver.config import ENV_PREFIX, Settings
from paramserver.launch.spawn import ROLES, common_environment
from paramserver.preload.starter import Preloading
from paramserver.preload.title import ROOM
from paramserver.processes.lines import OnceHeard, Output
from paramserver.processes.process import Child, Guard

_PROGRAM = "paramserver.roles.preloaded"


async def preload(
    settings: Settings, script: Path, guard: Guard, output: Callable[[str], Output], say: Callable[[str], None]
) -> Preloading:
    """A starter whose processes are forked. ``output(name)`` makes what takes a stream of a process."""

    def child() -> Child:
        return Child("preload", guard, lambda name: OnceHeard(lambda: output(name)))

    preloading = Preloading(ROLES, [sys.executable, "-m", _PROGRAM, str(script), ROOM], child, ENV_PREFIX, say)
    for threads in sorted({1, settings.training.threads_per_worker}):
        await preloading.prepare(common_environment(threads))
    return preloading
