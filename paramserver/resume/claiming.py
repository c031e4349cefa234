"""How a job gets its place of checkpoints: the place has no owner, or the job was told to go on from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

import structlog

from paramserver import errors
from paramserver.checkpoint import catalog, owner
from paramserver.checkpoint.owner import Holding, Owner, Verdict, Wish
from paramserver.checkpoint.place import Place
from paramserver.processes.alive import process_birth

log = structlog.get_logger("paramserver.checkpoint")

BEAT_S = 5.0
# An owner on another machine is gone if its beat has not risen for so long.
SILENT_S = 4 * BEAT_S
# Seconds that a process on this machine has to end.
ENDING_S = 5.0
_LOOK_S = 0.2
# The claims of this process that have not been given up.
_live: set[str] = set()


@dataclass(frozen=True, slots=True)
class Claim:
    """A request for a place. ``histories``: of a job that takes over. ``choices``: the ways out of a refused user."""

    job: str
    wish: Wish
    coordinator: str = ""
    histories: Sequence[str] = ()
    choices: str = ""


async def claim(place: Place, wanted: Claim) -> Holding:
    """Make the place the job's. Raises ConfigError if it is, or may be, another job's; CheckpointError."""
    while True:
        found = await _left_behind(place, wanted)
        mine = await asyncio.to_thread(_take, place, wanted, found)
        if mine is None:
            continue
        if not place.local:  # there is no lock: the last writer has the place
            await asyncio.sleep(_LOOK_S)
            if await _read(place) != mine:
                _live.discard(mine.claim)
                continue
        unused = found is None and not await asyncio.to_thread(owner.used, place)
        return Holding(place, mine.histories, mine, unused=unused)


async def keep_up(holding: Holding) -> None:
    """Beat until cancelled: this process lives. A place that could not be claimed is claimed when that is possible."""
    while True:
        await asyncio.sleep(BEAT_S)
        with contextlib.suppress(errors.ParamServerError):  # the next checkpoint fails, and says so
            if holding.mine is None and holding.later is not None:
                holding.mine = (await holding.later()).mine
            await asyncio.to_thread(holding.beat)


async def leave(holding: Holding, ended: bool) -> None:
    """This process keeps the place no longer. Errors do not matter: others notice the silence."""
    try:
        with contextlib.suppress(errors.CheckpointError):
            await asyncio.to_thread(holding.leave, ended)
    finally:
        if holding.mine is not None:
            _live.discard(holding.mine.claim)


# ---- is somebody there?


async def _left_behind(place: Place, wanted: Claim) -> Owner | None:
    """The former owner of the place, once it is known to be gone. Raises ConfigError if it lives."""
    began = time.monotonic()
    found = first = await _read(place)
    told = False
    while found is not None and wanted.wish is not Wish.TAKE_OVER:
        lives = _lives(found, place)
        if lives is False:
            break
        waited = time.monotonic() - began
        if lives is None and waited >= SILENT_S:
            break
        moved = first is not None and (found.claim, found.beat) != (first.claim, first.beat)
        if moved or (lives and waited >= (ENDING_S if wanted.wish in (Wish.RESUME, Wish.AGAIN) else 0.0)):
            raise errors.ConfigError(
                f"{place} is in use: {found} keeps its checkpoints there; choose another directory, or end that job"
            )
        if lives is None and not told and wanted.wish is not Wish.BEGIN:
            told = True
            log.info(f"waiting {SILENT_S:g} s to see whether {found} still lives, which keeps its checkpoints there")
        refused = lives is None and wanted.wish is Wish.BEGIN and bool(await asyncio.to_thread(owner.used, place))
        if refused:  # the job does not get the place in any case
            break
        await asyncio.sleep(_LOOK_S)
        found = await _read(place)
    return found


async def _read(place: Place) -> Owner | None:
    try:
        found: Owner | None = await asyncio.to_thread(owner.read, place)
        return found
    except errors.CheckpointError as error:
        raise errors.ConfigError(
            f"{error}: whose the checkpoints are cannot be told; choose another directory, or remove that file"
        ) from error


def _lives(found: Owner, place: Place) -> bool | None:
    """Whether the process that keeps the place lives; None if only its silence can tell."""
    if not found.live:
        return False
    if found.machine != _machine():
        return None
    if place.local and not place.holds(found.path):
        return False  # this is a copy of the owner's place
    if found.pid == os.getpid():
        return found.claim in _live
    return process_birth(found.pid) == found.birth != 0


def _machine() -> str:
    """Equal for two processes that see each other's process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return f"{socket.gethostname()}"
    return f"{boot}-{space}"


# ---- taking it


def _take(place: Place, wanted: Claim, found: Owner | None) -> Owner | None:
    """Write the job's OWNER.json; None if another process was faster, so that the place has to be looked at again."""
    with place.lock():
        if owner.read(place) != found:
            return None
        newest = owner.used(place)
        verdict = owner.judge(found, bool(newest), wanted.wish, wanted.job, wanted.histories)
        if verdict is Verdict.OTHERS:
            raise errors.ConfigError(f"{place} is kept by {found} by now, and no longer by job {wanted.job}")
        if verdict is Verdict.USED:
            whose = f"job {found.job}" if found is not None else f"job {catalog.job_of(place, newest) or '?'}"
            raise errors.ConfigError(f"{place} holds checkpoints of {whose} (the newest is {newest}): {wanted.choices}")
        if verdict is Verdict.SET_ASIDE:
            aside = place.set_aside([owner.OWNER])
            log.warning(f"the checkpoints that were in {place} are in {aside} now")
        mine = Owner(
            job=wanted.job,
            histories=_histories(place, wanted, found, verdict),
            coordinator=wanted.coordinator,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            birth=process_birth(os.getpid()),
            path=place.path,
            claim=token_hex(8),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        _live.add(mine.claim)  # before another claim can read it
        owner.write(place, mine)
    return mine


def _histories(place: Place, wanted: Claim, found: Owner | None, verdict: Verdict) -> tuple[str, ...]:
    if verdict is not Verdict.GO_ON:
        return owner.continued(())
    if wanted.wish is Wish.TAKE_OVER and wanted.histories:
        return tuple(wanted.histories)
    if wanted.wish is Wish.AGAIN and found is not None:
        return found.histories
    if found is not None:
        return owner.continued(found.histories)
    return owner.continued(sorted({manifest.history for manifest in catalog.complete(place)}, reverse=True))
