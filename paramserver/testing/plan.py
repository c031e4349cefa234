"""A plan of faults as a value: read from a TOML file, or made from a seed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from paramserver.errors import ConfigError
from paramserver.testing.faults import Fault
from paramserver.testing.places import PLACES
from paramserver.transport.base import METHODS

_WHO = re.compile(r"\*|coordinator|store|(server|worker)-(\*|\d+)")
# The possible actions, by the key that says where a fault strikes.
ACTIONS: Mapping[str, tuple[str, ...]] = {
    "at": ("kill", "stop", "delay", "error", "note"),
    "call": tuple(fault.value for fault in Fault),
    "process": ("kill", "stop", "term"),
    "storage": ("full", "read_only", "gone", "slow"),
}
_LASTS = ("stop", "delay", "reorder", *ACTIONS["storage"])
_KEYS: Mapping[str, tuple[str, ...]] = {
    "at": ("at", "do", "who", "step", "nth", "times", "seconds"),
    "call": ("call", "do", "who", "step", "nth", "times", "seconds", "share"),
    "process": ("process", "do", "step", "after_s", "seconds"),
    "storage": ("storage", "do", "step", "after_s", "seconds"),
}
_MAX_S = 600.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault.

    ``kind``: "at" (a place in the code), "call" (messages of a kind), "process", or "storage" (where checkpoints lie:
    all processes that touch it are struck). ``what``: the name of the place,
    call or process, or a pattern of names ("ckpt.*"). ``who``: the member that the fault strikes, or a pattern; of a
    call, the caller. ``step``: only on this step; of a call, from this step on; of a process, when the job has reached
    this step; None: on any step. ``nth``: not before a process reaches the place for the n-th time. ``times``: how
    often at most in the whole run, over all processes that begin anew (0: no limit). ``seconds``: the duration of the
    fault. ``share``: the part of the calls that is hit. ``after_s``: seconds since the first step.
    """

    kind: str
    what: str
    do: str
    who: str = "*"
    step: int | None = None
    nth: int = 1
    times: int = 1
    seconds: float = 0.5
    share: float = 1.0
    after_s: float | None = None

    def strikes(self, kind: str, what: str, who: str) -> bool:
        """Whether the fault is planned for ``what`` in the process ``who``."""
        return self.kind == kind and fnmatchcase(what, self.what) and fnmatchcase(who, self.who)

    def __str__(self) -> str:
        """As in "kill server-1 at push.after_stage, step 7"."""
        text = {
            "at": f"{self.do} {self.who} at {self.what}",
            "call": f"{self.do} {self.what} of {self.who}",
            "process": f"{self.do} {self.who}",
            "storage": f"{self.do.replace('_', '-')} {self.what}",
        }[self.kind]
        if self.do in _LASTS:
            text += f" for {self.seconds:g} s"
        if self.step is not None:
            text += f", {'from ' if self.kind == 'call' else ''}step {self.step}"
        if self.after_s is not None:
            text += f", after {self.after_s:g} s"
        if self.nth != 1:
            text += f", time {self.nth}"
        if self.share != 1.0:
            text += f", {self.share:.0%} of them"
        if self.times != 1:
            text += f", at most {self.times} times" if self.times else ", every time"
        return text


@dataclass(frozen=True, slots=True)
class Plan:
    """All faults of a run. ``seed`` decides where a ``share`` of calls is hit."""

    faults: tuple[Planned, ...]
    seed: int = 0

    def to_toml(self) -> str:
        """The text that :func:`parse` reads."""
        lines = [f"seed = {self.seed}"]
        for fault in self.faults:
            lines += ["", "[[fault]]", f'{fault.kind} = "{fault.what}"', f'do = "{fault.do}"']
            lines += [f'who = "{fault.who}"'] if fault.kind in ("at", "call") and fault.who != "*" else []
            for key, default in (("step", None), ("after_s", None), ("nth", 1), ("times", 1), ("share", 1.0)):
                value = getattr(fault, key)
                lines += [f"{key} = {value}"] if value != default else []
            lines += [f"seconds = {fault.seconds}"] if fault.do in _LASTS else []
        return "\n".join(lines) + "\n"


def load(path: Path) -> Plan:
    """The plan in a file. Raises ConfigError, naming file, fault and field."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the plan {path} cannot be read: {why}") from error
    return parse(text, str(path))


def parse(text: str, where: str = "the plan") -> Plan:
    """A plan from TOML. Raises ConfigError, naming ``where``, fault and field."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error
    for key in values:
        if key not in ("seed", "fault"):
            raise ConfigError(f"{where}: unknown key {key!r}; a plan has seed and [[fault]]")
    seed = _integer(values.get("seed", 0), f"{where}: seed", 0)
    entries = values.get("fault", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where}: faults are written as [[fault]], each with keys of its own")
    if not entries:
        raise ConfigError(f"{where} plans no fault: add [[fault]]")
    return Plan(tuple(_fault(entry, f"{where}: fault {n}") for n, entry in enumerate(entries, 1)), seed)


def _fault(entry: Mapping[str, Any], where: str) -> Planned:
    kinds = [kind for kind in ACTIONS if kind in entry]
    if len(kinds) != 1:
        raise ConfigError(f"{where} needs one of at, call, process and storage, not {' and '.join(kinds) or 'none'}")
    kind = kinds[0]
    for key in entry:
        if key not in _KEYS[kind]:
            raise ConfigError(f"{where}: unknown key {key!r}; with {kind} go {', '.join(_KEYS[kind])}")
    what, do = _text(entry[kind], f"{where}: {kind}"), _text(entry.get("do", ""), f"{where}: do")
    if do not in ACTIONS[kind]:
        raise ConfigError(f"{where}: do = {do!r}; with {kind} it is one of {', '.join(ACTIONS[kind])}")
    who = what if kind == "process" else "*" if kind == "storage" else _text(entry.get("who", "*"), f"{where}: who")
    if not _WHO.fullmatch(who):
        raise ConfigError(
            f"{where}: {who!r} is no member; name coordinator, store, server-0, worker-0, or a pattern as worker-*"
        )
    checks = {"at": _check_place, "call": _check_call, "process": _check_process, "storage": _check_storage}
    checks[kind](entry, what, do, who, where)
    if "seconds" in entry and do not in _LASTS:
        raise ConfigError(f"{where}: seconds goes with {', '.join(_LASTS)}, not with {do}")
    return Planned(
        kind=kind,
        what=what,
        do=do,
        who=who,
        step=None if "step" not in entry else _integer(entry["step"], f"{where}: step", 0),
        nth=_integer(entry.get("nth", 1), f"{where}: nth", 1),
        times=_integer(entry.get("times", 1), f"{where}: times", 0),
        seconds=_number(entry.get("seconds", 0.5), f"{where}: seconds", _MAX_S),
        share=_number(entry.get("share", 1.0), f"{where}: share", 1.0),
        after_s=None if "after_s" not in entry else _number(entry["after_s"], f"{where}: after_s", 1e6),
    )


def _check_place(entry: Mapping[str, Any], what: str, do: str, who: str, where: str) -> None:
    places = {name: place for name, place in PLACES.items() if fnmatchcase(name, what)}
    if not places:
        raise ConfigError(f"{where}: there is no place {what!r}; the places are {', '.join(PLACES)}")
    roles = {place.role for place in places.values()}
    if who != "*" and who.partition("-")[0] not in roles:
        raise ConfigError(f"{where}: {who} never comes to {what}, only a {' or a '.join(sorted(roles))} does")
    if "step" in entry and not any(place.steps for place in places.values()):
        raise ConfigError(f"{where}: {what} belongs to no step; leave step out, and use nth")
    if do == "error" and not all(place.error for place in places.values()):
        possible = ", ".join(name for name, place in PLACES.items() if place.error)
        raise ConfigError(f"{where}: an error is possible at {possible}, not at {what}")


def _check_call(entry: Mapping[str, Any], what: str, do: str, who: str, where: str) -> None:
    if not any(fnmatchcase(method, what) for method in METHODS):
        raise ConfigError(f"{where}: there is no call {what!r}; the calls are {', '.join(METHODS)}")
    if who == "store":
        raise ConfigError(f"{where}: the store makes no calls; name the caller")


def _check_process(entry: Mapping[str, Any], what: str, do: str, who: str, where: str) -> None:
    if "*" in who:
        raise ConfigError(f"{where}: process = {who!r}; name one process, as worker-1")
    _check_when(entry, where)


def _check_storage(entry: Mapping[str, Any], what: str, do: str, who: str, where: str) -> None:
    if what != "checkpoints":
        raise ConfigError(f"{where}: storage = {what!r}; the only storage is checkpoints")
    _check_when(entry, where)


def _check_when(entry: Mapping[str, Any], where: str) -> None:
    if ("step" in entry) == ("after_s" in entry):
        raise ConfigError(f"{where} needs one of step and after_s, to say when")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} is a text, not {value!r}")
    return value


def _integer(value: object, where: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{where} is a whole number of at least {least}, not {value!r}")
    return value


def _number(value: object, where: str, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        raise ConfigError(f"{where} is a number above 0, at most {most:g}, not {value!r}")
    return float(value)
