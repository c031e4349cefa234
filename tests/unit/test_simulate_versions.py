"""A simulated worker takes one version in, the same of all servers, where some are further than others."""

from __future__ import annotations

import math
from itertools import repeat

from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import AtLeast
from paramserver.core.versions.names import SyncName
from paramserver.simulate.machinery.blame import NOTHING, Part
from paramserver.simulate.machinery.clock import Process, VirtualClock, start
from paramserver.simulate.machinery.cores import Cores
from paramserver.simulate.parts.hosts import Host, Network, Program
from paramserver.simulate.parts.member import Member
from paramserver.simulate.servers.rules import Rules
from paramserver.simulate.servers.shard import Shard
from tests.support.costs import FREE


class Pair:
    """Two servers of a synchronous job of one slice per step, and a worker that asks for version 1."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = Network(self.clock, FREE)
        rules = Rules(self.clock, self.network, FREE, Consistency(Mode.SYNC), [1, 2], 0.0, on_published=lambda _: None)
        self.shards = [Shard(rules, index, self.program(), []) for index in range(2)]
        self.member = Member(self.clock, 0, self.shards, self.program(), 1.0, repeat(1.0), 0.0)
        self.heard: list[list[int]] = []

    def program(self) -> Program:
        return Program(Host(self.clock, math.inf, Cores(self.clock)), Part.WORKER_LINK)

    def publish(self, index: int, *versions: int) -> None:
        """Another worker brings what makes these versions of one server."""
        server = self.shards[index]
        for version in versions:
            server.push(self.program(), SyncName(version - 1, 0, 1, 1), 2, version - 1, 0).ready(1.0, NOTHING)
            self.clock.run(lambda version=version: server.state.version == version)  # type: ignore[misc]

    def ask(self) -> None:
        def process() -> Process[None]:
            answers = yield from self.member.pull(AtLeast(1))
            answers = yield from self.member.agreed(answers)
            self.heard.append([answer.version for answer in answers])

        start(process())

    def listen(self) -> list[int]:
        self.clock.run(lambda: bool(self.heard))
        return self.heard[0]


def test_the_older_version_is_taken_of_all() -> None:
    pair = Pair()
    pair.publish(0, 1, 2)
    pair.publish(1, 1)
    pair.ask()
    assert pair.listen() == [1, 1]
    assert pair.member.versions == [1, 1]


def test_a_later_version_is_waited_for_where_the_older_one_is_dropped() -> None:
    """Server 0 keeps versions 2 and 3; server 1 has version 1 first, and version 2 after the worker has asked."""
    pair = Pair()
    pair.publish(0, 1, 2, 3)
    pair.publish(1, 1)
    pair.ask()
    pair.publish(1, 2)
    assert pair.listen() == [2, 2]
