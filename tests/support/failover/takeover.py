"""A job with several coordinators in one process, each of which can be killed, paused, or cut off from the store.

Coordinators run `Coordinating`, servers the loop of `Serving`, workers are threads; the network is in memory and the
store is one `FragileStore`, whose clock a test can put forward. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import torch

from paramserver import errors, logs
from paramserver.config import Settings, load_settings
from paramserver.coordinator.leadership.journal import parse_record
from paramserver.coordinator.rpc.status import status_page
from paramserver.coordinator.service import CoordinatorService
from paramserver.membership.joining import JoinOptions
from paramserver.resume.options import Options
from paramserver.roles.coordinating import Coordinating
from paramserver.roles.serving import Serving
from paramserver.server.member import ServerMember
from paramserver.server.service import ServerService
from paramserver.transport.base import Channel
from paramserver.transport.rotating import coordinator_channel
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.worker.background import Background
from paramserver.worker.context import Context
from paramserver.worker.engine import Engine
from tests.support.cluster.faults import FaultPlan, Rule
from tests.support.cluster.harness import CALL_S, JOB_S, Died, until
from tests.support.cluster.processes import Network, Process, install
from tests.support.cluster.taps import Commands, StoreLink, TappedChannel, TappedEndpoint, Trap
from tests.support.failover.stores import FragileStore

T = TypeVar("T")
Script = Callable[[Context], object]
JOB = "test"
_PIDS = itertools.count(5_000_000)


class Chief:
    """One coordinator process at the address ``place``."""

    def __init__(self, fleet: Fleet, place: str, options: Options, settings: Settings) -> None:
        self.place = place
        self.process = Process(place)
        self.store = StoreLink(fleet.store, self._before, self._after)
        self.said: list[str] = []
        self._fleet = fleet
        self._trap = None if fleet.chiefs else fleet.trap
        self.coordinating = Coordinating(
            settings, options, lambda: self.store, "memory", Security(), self._connect, self.said.append
        )
        self.coordinating.address = place
        fleet.network.serve_in(
            self.process,
            place,
            [("Coordinator", TappedEndpoint(self.coordinating.endpoint, self._before, self._after))],
        )
        self.task = self.process.start(self._run())

    def _connect(self, address: str) -> Channel:
        outward = self._fleet.network.connect_from(self.process.out)
        return TappedChannel(outward(address), self._before, self._after, self._fleet.commands)

    async def _run(self) -> int:
        try:
            return await self.coordinating.run(self._leads)
        finally:
            self._fleet.network.kill(self.place)

    def _leads(self) -> None:
        service = self.service
        assert service is not None
        self._fleet.reigns.append((service.job.term, self.place))

    async def _before(self, what: str) -> int:
        return await self._trap.before(what, self.die) if self._trap is not None else -1

    async def _after(self, what: str, number: int) -> None:
        if self._trap is not None:
            await self._trap.after(what, number, self.die)

    @property
    def service(self) -> CoordinatorService | None:
        """The job, while it leads."""
        return self.coordinating.endpoint.service

    def die(self) -> None:
        """SIGKILL: it writes and says nothing any more. Its lease runs out at once."""
        self._fleet.network.end(self.process, self.place)
        self._fleet.expire()


class Keeper:
    """One server process."""

    def __init__(
        self, fleet: Fleet, index: int, address: str, plan: Sequence[Rule], replaces: Sequence[int] = ()
    ) -> None:
        self.index = index
        self.address = address
        self.process = Process(address)
        self.process.out.rules = tuple(plan)
        self.stop = asyncio.Event()
        self._fleet = fleet
        connect = fleet.network.connect_from(self.process.out)
        coordinator = coordinator_channel(fleet.places, connect)
        self.service = ServerService(JOB, connect, JOB_S, shares=fleet.settings.cluster.transport != "grpc")
        # A number that no other process of the fleet has, as if each were one of its own.
        self.pid = next(_PIDS)
        self.member = ServerMember(self.service, coordinator, address, index, JOB_S, replaces=replaces, pid=self.pid)
        self._serving = Serving(fleet.settings, Security(), coordinator, index)
        fleet.network.serve_in(self.process, address, [("Shard", self.service)])
        self.task = self.process.start(self._run())

    async def _run(self) -> None:
        try:
            await self.member.join()
            await self._serving.until_over(self.member, self.stop)
        except errors.EndedError:
            pass  # it has come too late: the process ends with code 0
        finally:
            await self.member.close()
            self._fleet.network.kill(self.address)

    def cut(self) -> None:
        """Nobody reaches it, and it reaches nobody."""
        self.process.out.cut()
        self._fleet.network.line(self.address).cut()

    def heal(self) -> None:
        """Connected again."""
        self.process.out.heal()
        self._fleet.network.line(self.address).heal()

    def die(self) -> None:
        """SIGKILL."""
        self._fleet.network.end(self.process, self.address)


class Hand:
    """One worker thread that runs a script."""

    def __init__(self, fleet: Fleet, number: int, script: Script, plan: FaultPlan | None) -> None:
        self.number = number
        # What its calls suffer.
        self.out = plan or FaultPlan()
        self.context: Context | None = None
        self.error: BaseException | None = None
        self._fleet, self._script = fleet, script
        self._thread = threading.Thread(target=self._run, name=f"worker-{number}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            ctx = self.context = self._fleet.context(self)
            try:
                self._script(ctx)
            except Died:
                self._fleet.call(self.out.cut)
                return
            except BaseException:
                with suppress(errors.ParamServerError):
                    ctx.close()
                raise
            ctx.close()
        except BaseException as error:
            self.error = error

    @property
    def alive(self) -> bool:
        """Whether its script still runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for its end for a while."""
        self._thread.join(timeout_s)


class Fleet:
    """Coordinators, servers and workers of one job. Use as a context manager; nothing is started by itself."""

    def __init__(
        self,
        servers: int = 2,
        workers: int = 2,
        mode: str = "sync",
        staleness: int | str = 2,
        slices_per_step: int = 4,
        lease_s: float = 6.0,
        max_idle_s: float = 30.0,
        places: Sequence[str] = ("leader", "standby"),
        trap: Trap | None = None,
        **settings: object,
    ) -> None:
        torch.set_num_threads(1)
        # The first optimizer of a process loads a good part of torch, and holds everybody up for seconds.
        torch.optim.SGD([torch.zeros(1)], lr=0.0)
        logs.configure("error")
        values: dict[str, object] = {
            "cluster.job": JOB,
            "cluster.servers": servers,
            "cluster.workers": workers,
            # Where a test is not about replicas, a lost server sends the job back.
            "cluster.replicas": 0,
            "cluster.lease_s": lease_s,
            "cluster.max_idle_s": max_idle_s,
            "cluster.join_timeout_s": JOB_S,
            "consistency.mode": mode,
            "consistency.staleness": staleness,
            "training.slices_per_step": slices_per_step,
            "training.device": "cpu",
            "cluster.transport": "grpc",
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        self._values = values
        self.settings = load_settings(None, values, environ={})
        self.places = list(places)
        self.trap = trap
        self.network = Network()
        self.commands = Commands()
        # Who led, in order: (term, place).
        self.reigns: list[tuple[int, str]] = []
        self.chiefs: list[Chief] = []
        self.keepers: list[Keeper] = []
        self.hands: list[Hand] = []
        self._ahead_s = 0.0
        self.store = FragileStore(lambda: time.monotonic() + self._ahead_s)
        self.background = Background()

    def __enter__(self) -> Fleet:
        self.call(lambda: install(asyncio.get_running_loop()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(errors.ParamServerError):
            self.run(self._end())
        for hand in self.hands:
            hand.join(10.0)
        self.background.close()

    def _processes(self) -> list[Process]:
        return [*(chief.process for chief in self.chiefs), *(keeper.process for keeper in self.keepers)]

    async def _end(self) -> None:
        for process in self._processes():
            if not process.killed:
                process.resume()
        for chief in self.chiefs:
            if chief.service is not None and not chief.process.killed:
                await chief.service.job.fail("the test is over")
        for hand in self.hands:
            hand.out.heal()
        await asyncio.gather(*(asyncio.to_thread(hand.join, 3.0) for hand in self.hands))
        for keeper in self.keepers:
            keeper.stop.set()
            if not keeper.member.session.member:  # it is no member yet, and would look for a coordinator to the end
                keeper.task.cancel()
        # While there is still a leader to say goodbye to.
        living = [keeper.task for keeper in self.keepers if not keeper.process.killed]
        if living:
            await asyncio.wait(living, timeout=3.0)
        for chief in self.chiefs:
            chief.store.cut = True
            chief.task.cancel()
        for keeper in self.keepers:
            if keeper.process.killed:
                keeper.task.cancel()
                if keeper.member.session._task is not None:
                    keeper.member.session._task.cancel()  # it need not try to say goodbye
        for process in self._processes():
            if process.killed:
                process.bury()
        tasks: list[asyncio.Task[Any]] = [*(c.task for c in self.chiefs), *(k.task for k in self.keepers)]
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()

    # ---- starting

    def coordinate(self, place: str = "leader", settings: Mapping[str, object] | None = None, **options: Any) -> Chief:
        """Start a coordinator, with these ``settings`` changed; see `paramserver.resume.options.Options`."""
        changed = load_settings(None, {**self._values, **(settings or {})}, environ={})
        chief = self.call(lambda: Chief(self, place, Options(**options), changed))
        self.chiefs.append(chief)
        return chief

    def serve(self, index: int, address: str = "", plan: Sequence[Rule] = ()) -> Keeper:
        """Start a server, at ``address`` or at its usual one, whose calls suffer what ``plan`` says."""
        keeper = self.call(lambda: Keeper(self, index, address or f"server-{index}", plan))
        self.keepers.append(keeper)
        return keeper

    def work(self, script: Script, plan: FaultPlan | None = None) -> Hand:
        """Start a worker."""
        hand = Hand(self, len(self.hands), script, plan)
        self.hands.append(hand)
        return hand

    def begin(self, script: Script | None = None, **options: Any) -> Chief:
        """A leader, one that stands by, all servers, and, with a ``script``, all workers; returns the leader.

        ``options``: of the leader.
        """
        leader = self.coordinate(self.places[0], **options)
        until("somebody leads", lambda: leader.service is not None or leader.task.done())
        for place in self.places[1:]:
            standby = self.coordinate(place).coordinating
            until(f"{place} stands by", lambda one=standby: one.leads or "stands by" in one.endpoint.doing)  # type: ignore[misc]
        for index in range(self.settings.cluster.servers):
            self.serve(index)
        for _ in range(self.settings.cluster.workers if script is not None else 0):
            assert script is not None
            self.work(script)
        return leader

    def context(self, hand: Hand) -> Context:
        """What `ps.init` gives a worker."""
        connect = self.network.connect_from(hand.out)
        options = JoinOptions(
            role=types_pb2.ROLE_WORKER, job=JOB, index=hand.number, pid=os.getpid() + hand.number, join_timeout_s=JOB_S
        )
        coordinator, transport = coordinator_channel(self.places, connect), self.settings.cluster.transport
        engine = Engine(self.background, connect, coordinator, options, JOB_S, transport)
        engine.join()
        return Context(self.settings, engine, lambda ctx: ctx.engine.close())

    # ---- time and calls

    def run(self, work: Any) -> Any:
        """Run a coroutine in the loop."""
        return self.background.run(work, JOB_S)

    def call(self, work: Callable[[], T]) -> T:
        """Call a function in the loop."""

        async def go() -> T:
            return work()

        return self.background.run(go(), CALL_S)

    def expire(self) -> None:
        """Put the store's clock forward: the lease of whoever does not renew it is over."""
        self._ahead_s += self.settings.cluster.lease_s + 0.1

    def cut_store(self, cut: bool) -> None:
        """The store is away for all coordinators, or back."""
        for chief in self.chiefs:
            chief.store.cut = cut

    def kill(self, chief: Chief) -> None:
        """Kill a coordinator from another thread."""
        self.call(chief.die)

    def ask(self, method: str, request: Any, place: str = "", timeout_s: float = CALL_S) -> Any:
        """Call whoever leads, or the coordinator at ``place``."""
        connect = self.network.connect_from(FaultPlan())
        channel = connect(place) if place else coordinator_channel(self.places, connect)

        async def go() -> Any:
            for _ in range(200):
                try:
                    return await channel.call(method, request, timeout=timeout_s)
                except errors.UnavailableError:
                    if place:
                        raise
                    await asyncio.sleep(0.05)
            raise AssertionError("nobody leads")

        return self.background.run(go(), timeout_s + CALL_S)

    def change_mode(self, mode: str, staleness: int = 2) -> coordinator_pb2.ChangeConsistencyResponse:
        """What `paramserver set` does, without trying again."""
        request = coordinator_pb2.ChangeConsistencyRequest(
            mode=types_pb2.MODE_ASYNC if mode == "async" else types_pb2.MODE_SYNC, wait_s=CALL_S
        )
        if mode == "async":
            request.staleness = staleness
        reply = self.ask("Coordinator.SetConsistency", request)
        assert isinstance(reply, coordinator_pb2.ChangeConsistencyResponse)
        return reply

    # ---- looking

    @property
    def leader(self) -> Chief:
        """Who leads; fails after a while if nobody does."""
        living = [chief for chief in self.chiefs if not chief.process.killed]
        found = until("somebody leads", lambda: next((chief for chief in living if chief.service), None))
        assert found is not None
        return found

    def took_over(self, place: str = "standby") -> CoordinatorService:
        """Wait until the coordinator at ``place`` leads."""
        chief = [c for c in self.chiefs if c.place == place][-1]

        def found() -> CoordinatorService | None:
            if chief.task.done() and not chief.task.cancelled():
                chief.task.result()
            return chief.service

        service = until(f"{place} leads", found)
        assert service is not None
        return service

    def stats(self) -> list[shard_pb2.StatsResponse]:
        """What the shards count."""
        return [keeper.service.first.report() for keeper in self.keepers if not keeper.process.killed]

    def record(self) -> coordinator_pb2.JobRecord:
        """What the store has."""
        entry = self.store.entries.get("state")
        return parse_record(entry.value) if entry is not None else coordinator_pb2.JobRecord()

    def join(self, hands: Sequence[Hand] | None = None) -> None:
        """Wait for workers; raises the first error of a script."""
        waited = self.hands if hands is None else hands
        deadline = time.monotonic() + JOB_S
        for hand in waited:
            hand.join(max(0.0, deadline - time.monotonic()))
            assert not hand.alive, f"worker-{hand.number} is stuck\n{self.where_it_stands()}"
        for hand in waited:
            if hand.error is not None:
                raise hand.error

    def finish(self, hands: Sequence[Hand] | None = None) -> Mapping[str, Any]:
        """Wait for the workers, the leader and the servers; the summary of the job."""
        self.join(hands)
        chiefs = [c for c in self.chiefs if not (c.process.killed or (c.task.done() and c.task.exception()))]
        deadline = time.monotonic() + JOB_S
        while not any(c.task.done() and c.task.result() == 0 for c in chiefs):
            assert time.monotonic() < deadline, f"the job does not end\n{self.where_it_stands()}"
            time.sleep(0.005)
        until("the servers end", lambda: all(k.task.done() for k in self.keepers if not k.process.killed))
        for keeper in self.keepers:
            if not keeper.process.killed:
                keeper.task.result()
        self.check()
        record = self.record()
        assert record.view.state == types_pb2.JOB_STATE_DONE, record.view.reason
        found: dict[str, Any] = json.loads(record.summary)
        return found

    def check(self) -> None:
        """One leader per term, terms rise, and no number of a membership or term goes back or is used twice."""
        terms = [term for term, _ in self.reigns]
        assert terms == sorted(set(terms)), f"terms do not rise: {self.reigns}"
        self.commands.check()

    def where_it_stands(self) -> str:
        """For messages about a job that is stuck."""
        lines = [f"reigns {self.reigns}"]
        for chief in self.chiefs:
            lines.append(f"{chief.place}: {chief.coordinating.endpoint.doing} {chief.task}")
            if chief.service is not None:
                lines.append(str(status_page(chief.service.job, coordinator_pb2.StatusRequest()))[:3000])
        for keeper in self.keepers:
            lines.append(
                f"{keeper.address}: {str(keeper.service.first.report())[:1500]} {keeper.member.session.failure}"
            )
        for hand in self.hands:
            engine = hand.context.engine if hand.context else None
            if engine is not None:
                view = engine.member.session.view
                lines.append(
                    f"worker-{hand.number}: alive {hand.alive} {engine.progress.state} "
                    f"waits for {engine.member.waiting_for!r} "
                    f"{engine.shards.links.pulls.waiting_for if engine.shards.met else ''!r} term {view.term} "
                    f"generation {view.generation} {hand.error!r}"
                )
        return "\n".join(lines)
