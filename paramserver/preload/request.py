"""The process that the preloaded process is asked to make: its arguments, variables, descriptors. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """A process to fork.

    ``parent``: pid of the process whose child it becomes. ``argv``: its command line. ``environment``: all of its
    variables. ``targets``: the numbers that the descriptors which travel with the request get in the new process.
    """

    parent: int
    argv: Sequence[str]
    environment: Mapping[str, str]
    targets: Sequence[int]

    def encode(self) -> bytes:
        """The request as bytes. Text that is not UTF-8 (`os.fsdecode`) survives."""
        return json.dumps([self.parent, list(self.argv), dict(self.environment), list(self.targets)]).encode()

    @staticmethod
    def decode(data: bytes) -> Request:
        """The request that `encode` has made bytes of."""
        parent, argv, environment, targets = json.loads(data)
        return Request(parent, tuple(argv), environment, tuple(targets))


def key_of(environment: Mapping[str, str], own: str) -> frozenset[tuple[str, str]]:
    """The variables that processes of one preloaded process have in common: all that a library may read.

    ``own``: the prefix of variables that no library reads when it is imported.
    """
    return frozenset((name, value) for name, value in environment.items() if not name.startswith(own))
