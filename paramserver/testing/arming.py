"""Arms a process with a plan of faults if two variables of the environment are set. One of them is not enough (J22)."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from paramserver import failpoints

# The path of the plan.
ENV_PLAN = "PARAMSERVER_INTERNAL_CHAOS_PLAN"
# The second variable, set by `paramserver chaos` and by tests only.
ENV_FLAG = "PARAMSERVER_INTERNAL_CHAOS"
FLAG = "armed"

log = structlog.get_logger("paramserver.chaos")


def environment(plan: Path) -> dict[str, str]:
    """The variables that arm a process with the plan in this file."""
    return {ENV_PLAN: str(plan), ENV_FLAG: FLAG}


def note_process(name: str, pid: int) -> None:
    """Note a process that cannot arm itself, such as the store, so that faults can strike it."""
    if os.environ.get(ENV_FLAG) == FLAG and (path := os.environ.get(ENV_PLAN, "")):
        from paramserver.testing.processes import ProcessBook

        ProcessBook.beside(Path(path)).note(name, pid)


def arm_if_told(name: str) -> bool:
    """Arm this process if both variables are set. Returns whether it is armed. Every process of a job calls this
    function when it starts. ``name``: "worker-1", "coordinator".

    Raises ConfigError if the file holds no plan.
    """
    path = os.environ.get(ENV_PLAN, "")
    if not path:
        return False
    if os.environ.get(ENV_FLAG) != FLAG:
        log.warning(
            f"{ENV_PLAN} is set, but not the flag that goes with it: no faults are injected (use paramserver chaos)"
        )
        return False
    from paramserver.testing.armed import Armed
    from paramserver.testing.fired import FiredLog
    from paramserver.testing.plan import load
    from paramserver.testing.processes import ProcessBook

    plan = Path(path)
    failpoints.arm(Armed(load(plan), name, FiredLog.beside(plan), ProcessBook.beside(plan)))
    log.warning("faults are planned for this process", plan=path, process=name)
    return True
