"""Shards that move to another server while workers train, as workers see it: a double of a promoted backup.

Workers reach each shard under an address of its own. A move cuts this address off, as when a server dies, and the view
names another one. The same shard answers there, so all that the former server has published is there. Contributions of
the open step are there as well, unless `lose` says otherwise. Memory that the former server shared is gone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import pytest

from paramserver.coordinator.job import Job
from paramserver.core.versions.events import Joining, PullAsked
from paramserver.core.versions.names import SyncName
from paramserver.server.rpc.contributions import Contributions
from paramserver.server.running import RunningShard
from paramserver.server.versions.shard import Contribution
from paramserver.server.versions.sharing import Sharing
from paramserver.transport.addresses import shard_address
from paramserver.v1 import shard_pb2, types_pb2
from tests.support.cluster.harness import Cluster, until


class Moving:
    """The shards of a cluster that has begun, and has no workers yet."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cluster, self._network = cluster, cluster.job.network
        # How often each shard has moved.
        self.moves: Counter[int] = Counter()
        # Contributions that were answered and are lost: shard, name, number of the push.
        self.lost: list[tuple[int, SyncName, int]] = []
        # Contributions that came to a shard after it had moved.
        self.brought: list[tuple[int, SyncName, int]] = []
        # Members that have said to a shard that they are idle.
        self.idle: list[int] = []
        self._loses: set[tuple[int, int]] = set()
        self._tell(monkeypatch)
        self._look(monkeypatch)
        self._tasks: set[asyncio.Task[object]] = set()
        for shard in range(len(cluster.job.servers)):
            self._serve(shard)

    def _tell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        view = Job.view

        def moved(job: Job) -> types_pb2.View:
            told = view(job)
            told.placement = 1 + self.moves.total()
            for shard in told.shards:
                shard.address = shard_address(self._place(shard.index), shard.index)
                shard.server = f"{shard.server} after {self.moves[shard.index]} moves"
            return told

        monkeypatch.setattr(Job, "view", moved)

    def _look(self, monkeypatch: pytest.MonkeyPatch) -> None:
        count = Contributions.count

        async def counted(
            contributions: Contributions,
            shard: RunningShard,
            contribution: Contribution,
            header: shard_pb2.PushHeader,
            nbytes: int,
        ) -> shard_pb2.PushResponse:
            index, name = shard.config.shard, contribution.name
            if isinstance(name, SyncName):
                if (index, name.step) in self._loses:
                    self.lost.append((index, name, header.nonce))
                    return shard_pb2.PushResponse(
                        outcome=shard_pb2.OUTCOME_ACCEPTED, version=shard.state.version, own=False
                    )
                if self.moves[index]:
                    self.brought.append((index, name, header.nonce))
            return await count(contributions, shard, contribution, header, nbytes)

        monkeypatch.setattr(Contributions, "count", counted)
        idle = Contributions.idle

        async def heard(contributions: Contributions, request: shard_pb2.IdleRequest) -> shard_pb2.IdleResponse:
            self.idle.append(request.worker)
            return await idle(contributions, request)

        monkeypatch.setattr(Contributions, "idle", heard)

    def _place(self, shard: int) -> str:
        return f"place-{shard}-{self.moves[shard]}"

    def _serve(self, shard: int) -> None:
        self._network.serve(self._place(shard), [("Shard", self._cluster.job.servers[shard].service)])

    def running(self, shard: int) -> RunningShard:
        """The shard itself."""
        found = self._cluster.job.servers[shard].service.first.host.shard
        assert found is not None
        return found

    def lost_steps(self) -> set[tuple[int, int]]:
        """(shard, step) of all contributions that were lost."""
        return {(shard, name.step) for shard, name, _ in self.lost}

    # ---- what happens to a shard

    def lose(self, shard: int, step: int) -> None:
        """The shard will answer the contributions to this step, and will have lost them when it has moved."""
        self._loses.add((shard, step))

    def loss(self, shard: int, step: int, workers: int) -> None:
        """Wait until all workers wait for the version that they lack; then the shard moves."""
        until(
            f"{workers} workers that wait for shard {shard} in step {step}",
            lambda: (
                (shard, step) in self.lost_steps()
                and self._cluster.call_in_loop(lambda: len(self.running(shard).state.pulls)) >= workers
            ),
        )
        self.move(shard)

    def move(self, shard: int, at_work: Sequence[int] = ()) -> None:
        """The server dies, and another one has the shard. From any thread but the loop's."""
        self.cut(shard)
        self.announce(shard, at_work)

    def cut(self, shard: int) -> None:
        """The server dies."""
        self._cluster.call_in_loop(lambda: self.kill(shard))

    def kill(self, shard: int) -> None:
        """The server dies. In the loop."""
        self._network.kill(self._place(shard))

    def announce(self, shard: int, at_work: Sequence[int] = ()) -> None:
        """Another server has the shard of one that died. It believes that the members ``at_work`` are at work."""

        def go() -> None:
            self.moves[shard] += 1
            self._loses.difference_update({one for one in self.lost_steps() if one[0] == shard})
            running = self.running(shard)
            former, running.sharing = running.sharing, Sharing(running.plan, shard)
            for version in running.versions.values():
                version.slot = None
            former.close()
            self._serve(shard)
            timeline = running.config.timeline
            for member in at_work:
                self._begin(running.pull(partial(_joins, member, timeline), 0.0))
            self._begin(self._cluster.job.coordinator.job.changes.notify())

        self._cluster.call_in_loop(go)

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _joins(member: int, timeline: int, call: int) -> PullAsked:
    return PullAsked(call, member, Joining(), timeline)


def pushed_again(moving: Moving) -> bool:
    """Whether all lost contributions were brought again, as the same pushes: another server may have counted them."""
    return {*moving.lost} <= {*moving.brought}


def computed_once(moving: Moving) -> bool:
    """Whether all lost contributions were brought again, some of them as other pushes of the same bytes."""
    return {push[:2] for push in moving.lost} <= {push[:2] for push in moving.brought}
