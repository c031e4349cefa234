"""Servers that die, come and leave in a simulated job: `kill:1@10s`, `cut:1@10s`, `start:1@20s`, `drain:1@10s`."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from paramserver.errors import ConfigError
from paramserver.simulate import units

_EVENT = re.compile(r"([a-z]+):(?:server-)?([0-9]{1,4})@(.+)")


class Kind(enum.StrEnum):
    """A kind of event at a server."""

    # The server's process dies: its connections close.
    KILL = "kill"
    # The server's machine is cut off from all others: only the lease ends.
    CUT = "cut"
    # The server comes back, without its shards.
    START = "start"
    # An operator lets the server leave.
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """``server``: its index; ``at_s``: seconds since the job began."""

    kind: Kind
    server: int
    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Happening:
    """A change of the placement, in words. ``event``: a planned event caused it directly."""

    at_s: float
    text: str
    event: bool = False


def parse(text: str) -> ServerEvent:
    """Raises ConfigError."""
    found = _EVENT.fullmatch(text.strip())
    if found is None or found[1] not in list(Kind):
        raise ConfigError(
            f'--event is "{text}", but must be kill, cut, start or drain, a server and a time, such as kill:1@10s'
        )
    return ServerEvent(Kind(found[1]), int(found[2]), units.seconds("--event", found[3]), text.strip())


def check(events: tuple[ServerEvent, ...], servers: int, replicas: int) -> None:
    """Refuse events that cannot happen to these servers. Raises ConfigError."""
    there = set(range(servers))
    for event in sorted(events, key=lambda one: one.at_s):
        where = f"--event is {event.text}, but"
        if event.server >= servers:
            raise ConfigError(f"{where} the servers are server-0 to server-{servers - 1}")
        if not replicas:
            raise ConfigError(
                f"{where} no server has a copy of another server's shard: the job would go back to a checkpoint, which "
                "is not simulated; add --replicas 1 and have 2 or more servers"
            )
        if (event.kind is Kind.START) == (event.server in there):
            raise ConfigError(f"{where} server-{event.server} is {'there' if event.server in there else 'gone'} then")
        there ^= {event.server}
