"""The owner of a place of checkpoints: one job and one history, written into the place as OWNER.json.

A *history* is one run of a job, with its restarts and the coordinators that take it over, and the histories that it
was told to go on from. Every manifest names the history that wrote it. A run reads and deletes checkpoints of its own
histories, and no others.
"""

from __future__ import annotations

import enum
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paramserver.checkpoint import catalog
from paramserver.checkpoint.header import load_json
from paramserver.checkpoint.manifest import NewerFormatError
from paramserver.checkpoint.names import OWNER as OWNER
from paramserver.checkpoint.place import Place
from paramserver.errors import CheckpointError

FORMAT_VERSION = 1
_MAX_BYTES = 1 << 20
# Histories that a job remembers. A job that is resumed more often has long lost the checkpoints of the first ones.
_REMEMBERED = 100
_DAMAGED = "OWNER.json is damaged"


@dataclass(frozen=True, slots=True)
class Owner:
    """The content of OWNER.json.

    ``histories``: the job's own history first, then the histories that the job was told to go on from ("" is the
    history of checkpoints that name none). ``coordinator``: its address. ``host``, ``machine``, ``pid``, ``birth``: the
    process that keeps this file; ``machine`` changes with a reboot, and differs between containers. ``path``: the place
    as that process sees it. ``claim``: a number of that process's own. ``since``: ISO 8601, UTC. ``beat`` rises as long
    as the process lives. ``live``: the process has not said that it ends. ``ended``: the job is done, or was stopped by
    a person; not after a failure.
    """

    job: str
    histories: tuple[str, ...]
    coordinator: str = ""
    host: str = ""
    machine: str = ""
    pid: int = 0
    birth: int = 0
    path: str = ""
    claim: str = ""
    since: str = ""
    beat: int = 0
    live: bool = True
    ended: bool = False

    @property
    def history(self) -> str:
        """The job's own history."""
        return self.histories[0]

    def __str__(self) -> str:
        where = ", ".join(
            part for part in (self.coordinator and f"coordinator at {self.coordinator}", self.host) if part
        )
        return f"job {self.job} ({where or 'somewhere'}, since {self.since or '?'})"


def continued(histories: Sequence[str]) -> tuple[str, ...]:
    """The histories of a run that goes on from ``histories``: a new name comes first."""
    return (secrets.token_hex(8), *histories)[:_REMEMBERED]


def encode(owner: Owner) -> bytes:
    """The text of OWNER.json."""
    return json.dumps({"format_version": FORMAT_VERSION, **asdict(owner)}, indent=1, sort_keys=True).encode() + b"\n"


def decode(text: bytes) -> Owner:
    """The owner that a text of OWNER.json names. Raises CheckpointError if the text is damaged or of a later format."""
    table = load_json(text)
    if not isinstance(table, dict):
        raise CheckpointError(_DAMAGED)
    number = table.pop("format_version", None)
    if type(number) is int and number > FORMAT_VERSION:
        raise NewerFormatError(f"OWNER.json has format {number}, which a later paramserver has written: use that one")
    kinds: dict[str, type] = {name: type(value) for name, value in asdict(Owner("", ("",))).items()}
    if set(table) != set(kinds):
        raise CheckpointError(_DAMAGED)
    values: dict[str, Any] = dict(table)
    if not isinstance(values["histories"], list) or not values["histories"]:
        raise CheckpointError(_DAMAGED)
    values["histories"] = tuple(values["histories"])
    right = all(type(values[name]) is kind for name, kind in kinds.items())
    texts = [text for text in (*values.values(), *values["histories"]) if isinstance(text, str)]
    right = right and all(isinstance(one, str) for one in values["histories"])
    if not right or any(not text.isprintable() or len(text) > 4096 for text in texts):
        raise CheckpointError(_DAMAGED)
    return Owner(**values)


def read(place: Place) -> Owner | None:
    """The owner of a place; None if there is no OWNER.json. Raises CheckpointError."""
    top = place.top
    if not top.exists(OWNER):
        return None
    try:
        return decode(top.read(OWNER, _MAX_BYTES))
    except NewerFormatError as error:
        raise NewerFormatError(f"{place}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error


def write(place: Place, owner: Owner) -> None:
    """Write OWNER.json. Raises CheckpointError."""
    place.top.write_atomically(OWNER, encode(owner))


def histories_in(place: Place) -> catalog.Ours:
    """Selects the checkpoints of the job that keeps the place; all, if the place names no owner."""
    kept = read(place)
    return (lambda history: True) if kept is None else (lambda history: history in kept.histories)


class Wish(enum.Enum):
    """The reason why a job asks for a place.

    BEGIN: the job begins anew. RESUME: it was told to go on from the checkpoints there. AGAIN: it is a restart of the
    job whose name the place bears, and begins anew if that job has ended. TAKE_OVER: it goes on where another
    coordinator of the same history was. FRESH: it begins anew, and the checkpoints there are set aside.
    """

    BEGIN = "begin"
    RESUME = "resume"
    AGAIN = "again"
    TAKE_OVER = "take over"
    FRESH = "fresh"


class Verdict(enum.Enum):
    """The job gets a NEW place, may GO_ON there, must SET_ASIDE the checkpoints first, or does not get it."""

    NEW = "new"
    GO_ON = "go on"
    SET_ASIDE = "set aside"
    USED = "used"
    OTHERS = "others"


def judge(found: Owner | None, used: bool, wish: Wish, job: str, histories: Sequence[str] = ()) -> Verdict:
    """Whether a job may have a place whose owner, ``found``, lives no more.

    ``used``: the place has checkpoints. ``histories``: of a job that takes over, its own history first.
    """
    if wish is Wish.TAKE_OVER:
        if found is None or not histories or found.history == histories[0]:
            return Verdict.GO_ON
        if not used and found.job == job and not found.live:  # of a coordinator that did not know of the job yet
            return Verdict.GO_ON
        return Verdict.OTHERS
    if not used:
        return Verdict.NEW
    if wish is Wish.FRESH:
        return Verdict.SET_ASIDE
    if wish is Wish.RESUME:
        return Verdict.GO_ON
    if wish is Wish.AGAIN and found is not None and found.job == job:
        return Verdict.SET_ASIDE if found.ended else Verdict.GO_ON
    return Verdict.USED


def used(place: Place) -> str:
    """The newest checkpoint there, damaged or not; "" if none was ever completed. Raises CheckpointError."""
    return next((found.name for found in catalog.survey(place) if not found.incomplete), "")


@dataclass(slots=True)
class Holding:
    """A job's hold on its place: the histories that are its own, and the proof that the place is still the job's.

    ``mine``: the owner that this process has written there; None if another process keeps OWNER.json up, or nobody
    does. ``private``: the place is nobody else's, and goes when the run ends. ``unused``: no job has had the place
    before, as far as the place tells. ``later``: claims the place, which could not be had when the job was taken over.
    """

    place: Place
    histories: tuple[str, ...]
    mine: Owner | None = None
    private: bool = False
    unused: bool = False
    later: Callable[[], Awaitable[Holding]] | None = None

    @property
    def history(self) -> str:
        """The job's own history, which new checkpoints name."""
        return self.histories[0]

    def ours(self, history: str) -> bool:
        """Whether a checkpoint of this history may be read and deleted."""
        return history in self.histories

    def check(self) -> None:
        """Raises CheckpointError if the place belongs to another job by now, or cannot be read."""
        if self.private:
            return
        found = read(self.place)
        if found is not None and found.history != self.history:
            raise CheckpointError(f"{self.place} is kept by {found} now")

    def lead_at(self, coordinator: str) -> None:
        """Put the coordinator's address into the next OWNER.json."""
        if self.mine is not None:
            self.mine = replace(self.mine, coordinator=coordinator)

    def beat(self) -> None:
        """Write that this process lives. Raises CheckpointError as :meth:`check` does, and if the write fails."""
        if self.mine is not None:
            self._write(replace(self.mine, beat=self.mine.beat + 1))

    def leave(self, ended: bool) -> None:
        """Write that this process ends. ``ended``: see `Owner`. Raises CheckpointError."""
        if self.mine is not None:
            self._write(replace(self.mine, live=False, ended=ended))

    def _write(self, mine: Owner) -> None:
        self.check()
        self.mine = mine
        write(self.place, mine)
