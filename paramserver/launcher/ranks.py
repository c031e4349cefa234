"""The workers of a DDP script are the ranks of a process group: none of them can go on without the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paramserver import errors
from paramserver.config import Settings
from paramserver.launcher.seats import ChildFailedError, Seat, Seats, how
from paramserver.launcher.spawn import Spawner
from paramserver.processes.process import stop_all

# One name for all ranks among those that are started again.
_RANKS = "a rank"
_PATIENCE_S = 1.5

# Settings of a model on the servers, which a DDP script does not have there.
_OF_MODELS = (
    "cluster.replicas",
    "checkpoint.dir",
    "checkpoint.every",
    "checkpoint.resume",
    "consistency.mode",
    "consistency.staleness",
    "run.records",
    "run.save",
    "run.summary",
    "run.track",
    "training.slices_per_step",
)


def refuse_with_ddp(settings: Settings) -> None:
    """Raise ConfigError for settings that would do nothing in a run of a DDP script."""
    origins = settings.origins()
    found = [f"{name} ({origins[name]})" for name in _OF_MODELS if origins[name] != "default"]
    if found:
        raise errors.ConfigError(
            f"with run.ddp weights, data and optimizer stay in the script, so these do nothing: {', '.join(found)}; "
            "leave them out"
        )


class Ranks:
    """Starts all ranks again when one was killed, as torchrun does. ``say`` prints a line for people."""

    def __init__(self, spawner: Spawner, seats: Seats, say: Callable[[str], None]) -> None:
        self._spawner, self._seats, self._say = spawner, seats, say
        seats.restarts.started(_RANKS)
        spawner.meet_anew()

    async def ended(self, seat: Seat, code: int, workers: Sequence[Seat]) -> int | None:
        """Deal with a rank that has ended with another code than 0; returns the exit code of the run if it is over.

        Raises ChildFailedError when the ranks have been started again too often.
        """
        if 0 < code != errors.RestartError.exit_code:
            self._say(f"{seat.name} failed with exit code {code}; the run ends")
            return code
        await self.again(f"{seat.name} ended unexpectedly ({how(code)})", code, workers)
        return None

    async def again(self, why: str, code: int, workers: Sequence[Seat]) -> None:
        """Stop all ranks that run, and start all of them again. Raises ChildFailedError if that was done too often."""
        restarts, fatal = self._seats.restarts, 128 - code if code < 0 else code
        if not restarts.most:
            raise ChildFailedError(f"{why}, and no rank can go on without the others; cluster.max_restarts is 0", fatal)
        pause_s = self._seats.count(_RANKS, code, fatal)
        self._say(
            f"{why}: all {len(workers)} ranks are started again, and the script begins anew or loads its own "
            f"checkpoint ({restarts.failures(_RANKS)} of at most {restarts.most} times)"
        )
        await stop_all([seat.child for seat in workers], _PATIENCE_S)
        self._spawner.meet_anew()
        for seat in workers:
            seat.due, seat.code = time.monotonic() + pause_s, None
