"""Keeps the processes of a run alive: starts dead processes again, and says when the run is over."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from paramserver import errors
from paramserver.launcher.poll import Poll
from paramserver.launcher.ranks import Ranks
from paramserver.launcher.seats import HOPELESS, ChildFailedError, Seat, Seats, how, server_pids
from paramserver.launcher.spawn import START_TIMEOUT_S, Spawner
from paramserver.machine.valkey import EmbeddedStore
from paramserver.processes.restarts import Restarts
from paramserver.processes.silence import Lingering, Silence
from paramserver.v1 import coordinator_pb2, types_pb2

# A worker's exit code after SIGTERM.
_TERMINATED = 143
_ENDED = (types_pb2.JOB_STATE_DONE, types_pb2.JOB_STATE_STOPPED)
_STORE = "store"
_COORDINATOR = "coordinator"


class Supervisor:
    """The processes of one run, from the first to the last. ``say`` prints a line for people.

    ``hang_s``: a coordinator that has not answered for so long is killed and started again; so is a server that has
    been no member for half as long. ``durable``: the store outlives the coordinator, so that another one can go on.
    ``ddp``: the workers are the ranks of a process group, which are started again together.
    """

    def __init__(
        self,
        spawner: Spawner,
        store: EmbeddedStore,
        restarts: Restarts,
        say: Callable[[str], None],
        hang_s: float,
        durable: bool,
        ddp: bool = False,
    ) -> None:
        self.restarts = restarts
        self._seats = Seats(restarts, say, hang_s / 2)
        self._ranks = Ranks(spawner, self._seats, say) if ddp else None
        self.coordinator: Seat | None = None
        self.servers: list[Seat] = []
        self.workers: list[Seat] = []
        self._spawner = spawner
        self._store = store
        self._say = say
        self._hang_s = hang_s
        self._durable = durable
        self._poll: Poll | None = None
        # The newest state that the coordinator has told.
        self._status = coordinator_pb2.StatusResponse()
        # Some worker has finished all epochs. A job that goes back takes this back.
        self._was_finished = False
        # The newest timeline while there were workers.
        self._worked_on = 0
        # Pids of all members so far.
        self._joined: set[int] = set()
        # How many workers there shall be.
        self._wanted = 0
        # Since when the coordinator has not answered.
        self._unheard = Silence()
        self._lingering = Lingering()
        self._answered_at = 0.0
        self._coordinated = 0

    # ---- starting

    async def start_coordinator(self) -> None:
        """Start the first coordinator; one that is killed before it listens is started again."""
        self.restarts.started(_COORDINATOR)
        while True:
            try:
                child = await self._spawner.coordinator()
                break
            except ChildFailedError as error:
                if error.code >= 0 or not self.restarts.most or not self._durable:
                    raise
                pause_s = self._seats.count(_COORDINATOR, error.code, error.code)
                self._say(f"coordinator ended unexpectedly ({how(error.code)}) and is started again")
                await asyncio.sleep(pause_s)
        self.coordinator = self._seats.take(child, lambda _: self._spawner.coordinator_again())

    async def start_server(self, index: int) -> None:
        """Start the first process of this seat."""
        child = await self._spawner.server(index)
        self.servers.append(self._seats.take(child, lambda pids: self._spawner.server(index, pids)))

    async def start_worker(self, index: int) -> None:
        """Start the first process of this seat."""
        child = await self._spawner.worker(index)
        self.workers.append(self._seats.take(child, lambda pids: self._spawner.worker(index, pids)))

    @property
    def _rest(self) -> list[Seat]:
        return [*([self.coordinator] if self.coordinator else []), *self.servers]

    # ---- watching

    def hear(self, status: coordinator_pb2.StatusResponse) -> None:
        """Take in the coordinator's newest answer."""
        self._status = status
        self._seats.reached(status)
        self._was_finished = self._was_finished or status.finished
        self._joined.update(process.pid for process in status.processes)
        if any(seat.child.running for seat in self.workers):
            self._worked_on = status.view.timeline

    async def watch(self, poll: Poll) -> int:
        """Watch until all workers have ended and no more are needed; returns the exit code of the run.

        Raises JobFailedError if the coordinator says so, ChildFailedError if something died too often.
        """
        self._poll = poll
        self.restarts.started(_STORE)
        self._wanted = self._wanted or len(self.workers)
        while True:
            self._look_at_store()
            for seat in (*self._rest, *self.workers):
                if seat.exit_code is not None and seat.due is None and seat.code is None:
                    code = await self._ended(seat)
                    if code is not None:
                        return code
            self._check_failed(self._status)
            self._check_hung(poll)
            self._name_those_who_linger()
            await self._scale()
            await self._scale_servers(self._status)
            self._leave_out()
            await self._seats.start_due((*self._rest, *self.workers))
            if all(seat.code is not None for seat in self.workers):
                code = await self._over()
                if code is not None:
                    return code
            await self._seats.pause((*self._rest, *self.workers))

    def failed(self) -> list[str]:
        """The processes that have ended with an exit code other than 0, those of the script first."""
        if self.coordinator is None:
            return [_COORDINATOR]
        return [seat.name for seat in (*self.workers, *self._rest) if (seat.exit_code or 0) > 0]

    def all_servers_run(self) -> bool:
        """Whether no server has ended; one that was not dealt with yet counts, too."""
        return all(seat.child.running for seat in self.servers)

    # ---- what has ended

    async def _ended(self, seat: Seat) -> int | None:
        """Deal with the end of a process; returns the exit code of the run if the run is over."""
        code = seat.exit_code
        assert code is not None
        assert self._poll is not None
        worker = seat in self.workers
        if worker and code == 0:
            seat.code = code
            return None
        if worker and self._ranks is not None:
            return await self._ranks.ended(seat, code, self.workers)
        if seat is not self.coordinator:
            status = await self._poll.ask()
            if status is not None:
                self._check_failed(status)
                await self._scale_servers(status)
        if not worker:
            if seat is self.coordinator or seat in self.servers:  # else the job has no place for this server any more
                self._again(seat, code)
            if self._ranks is not None and seat in self.servers:
                await self._ranks.again(f"{seat.name} held a part of each collective", code, self.workers)
            return None
        if code in (_TERMINATED, -signal.SIGTERM) or (seat.leaving and code < 0):
            seat.code = _TERMINATED
            self._say(f"{seat.name} was told to leave; its slices go to the others")
            return None
        if code > 0 and self._never_back(seat) and (self._nothing_left() or self._spare(seat)):
            self._say(f"{seat.name} could not join again ({how(code)}); its slices go to the others")
            if self._nothing_left():
                seat.code = code
            else:
                self._again(seat, code)
            return None
        if code > 0:
            self._say(f"{seat.name} failed with exit code {code}; the run ends")
            return code
        if self._nothing_left():
            self._say(f"{seat.name} was killed by signal {-code}, when the job had nothing left for it to do")
            seat.code = code
            return None
        self._say(f"{seat.name} was killed by signal {-code}; its slices go to the others")
        if self.restarts.most:
            self._again(seat, code)
        else:
            seat.code = code
        return None

    def _leave_out(self) -> None:
        """At the end, nobody waits for the next attempt of a worker that could not join again."""
        for seat in self.workers:
            if seat.due is not None and (seat.exit_code or 0) > 0 and self._nothing_left():
                seat.due, seat.code = None, seat.exit_code

    def _spare(self, seat: Seat) -> bool:
        """Whether the job goes on without this process: a server whose shards others hold, a worker that has not come
        back.
        """
        view = self._status.view
        if view.state != types_pb2.JOB_STATE_RUNNING or seat is self.coordinator:
            return False
        if seat in self.servers:
            return len(view.shards) == view.shard_count > 0
        others = [other.child for other in self.workers if other is not seat]
        return self._never_back(seat) and any(child.running and child.pid in self._joined for child in others)

    def _never_back(self, seat: Seat) -> bool:
        """Whether the process was started in place of another one, and has not become a member."""
        return bool(seat.former) and seat.child.pid not in self._joined

    def _nothing_left(self) -> bool:
        return self._status.finished or self._status.view.state in _ENDED

    def _again(self, seat: Seat, code: int) -> None:
        """Have a process started again soon. Raises ChildFailedError if that makes no sense."""
        fatal = code
        if code < 0 and seat in self.workers:
            fatal = 128 - code
        if seat is self.coordinator and not self._durable:
            raise ChildFailedError(
                f"{seat.name} ended unexpectedly ({how(code)}), and cluster.store = memory with it; the run cannot "
                "go on",
                code,
            )
        if code in HOPELESS and not seat.former and not self._spare(seat) and seat is not self.coordinator:
            raise ChildFailedError(f"{seat.name} ended with exit code {code}; it says why above", code)
        if not self.restarts.most:
            raise ChildFailedError(f"{seat.name} ended unexpectedly ({how(code)}); the run cannot go on", code)
        spare = self._spare(seat)
        seat.refused = seat.refused + 1 if spare and self._never_back(seat) else 0
        self._seats.again(seat, code, fatal, told=seat in self.workers, spare=spare)

    # ---- as many workers as wished for

    async def _scale(self) -> None:
        """Start more workers, of the lowest ranks that are free, or ask those of the highest ranks to leave."""
        wanted = self._status.wanted_workers or self._wanted
        if wanted == self._wanted or self._nothing_left() or self._ranks is not None:
            return
        self._wanted = wanted
        staying = [seat for seat in self.workers if seat.code is None and not seat.leaving]
        self._say(f"{wanted} workers are wished for, {len(staying)} are there")
        for seat in staying[wanted:]:
            seat.leaving = True
            if seat.due is None:
                seat.child.terminate()
            else:
                seat.due, seat.code = None, _TERMINATED
        for _ in range(wanted - len(staying)):
            await self._one_more()

    async def _scale_servers(self, status: coordinator_pb2.StatusResponse) -> None:
        """Start more servers, of the next indices, or end those of the highest indices, which hold nothing any more."""
        wanted = status.wanted_servers or len(self.servers)
        if wanted == len(self.servers) or self._nothing_left():
            return
        self._say(f"{wanted} servers are wished for, {len(self.servers)} are there")
        for seat in self.servers[wanted:]:
            if seat.child.running:
                seat.child.terminate()
        del self.servers[wanted:]
        for index in range(len(self.servers), wanted):
            await self.start_server(index)

    async def _one_more(self) -> None:
        for seat in self.workers:
            if seat.code is not None:
                seat.due, seat.code, seat.leaving = time.monotonic(), None, False
                return
        await self.start_worker(len(self.workers))

    def _look_at_store(self) -> None:
        code = self._store.exit_code
        if code is None:
            return
        if not self.restarts.most:
            raise ChildFailedError(f"the embedded store ended unexpectedly ({how(code)}); the run cannot go on", code)
        # The coordinator gets on without it for a while: no pause, and no harm in starting it in the loop.
        self._seats.count(_STORE, code, code)
        self._store.revive()
        self.restarts.started(_STORE)
        self._say(f"the embedded store ended unexpectedly ({how(code)}) and was started again")

    def _check_failed(self, status: coordinator_pb2.StatusResponse) -> None:
        if status.view.state == types_pb2.JOB_STATE_FAILED:
            raise errors.JobFailedError(f"the job has failed: {status.view.reason}")

    def _check_hung(self, poll: Poll) -> None:
        """Kill processes that run but do nothing; their end is dealt with like any other."""
        now, seat = time.monotonic(), self.coordinator
        if seat is not None and seat.child.running:
            answered = poll.answered_at > self._answered_at
            self._answered_at = max(self._answered_at, poll.answered_at)
            # From its start on, it is expected to answer.
            fresh = seat.child.pid != self._coordinated
            self._coordinated = seat.child.pid
            self._unheard.look(now, *(([seat.child.pid], []) if answered or fresh else ([], [seat.child.pid])))
            heard = self._answered_at >= seat.started_at
            silent_s = self._unheard.of(seat.child.pid)
            if silent_s > (self._hang_s if heard else max(self._hang_s, START_TIMEOUT_S)):
                self._say(f"{seat.name} has not answered for {silent_s:.0f} s; it is killed")
                self._unheard.forget(seat.child.pid)
                seat.child.kill()
            if answered:
                self._seats.check_servers(now, self._status, self.servers)

    # ---- the end

    def _name_those_who_linger(self) -> None:
        members = {one.pid for one in _members(self._status)}
        left = [seat for seat in self.workers if seat.child.running and seat.child.pid not in members]
        over = self._nothing_left() and self._ranks is None
        if said := self._lingering.look(time.monotonic(), [seat.name for seat in left] if over else []):
            self._say(said)

    async def _over(self) -> int | None:
        """All workers have ended: the exit code of the run, None if the run is not over."""
        codes = [seat.code for seat in self.workers if seat.code is not None]
        if 0 not in codes:
            self._say("no script has come to its end; the run ends")
            return _TERMINATED if _TERMINATED in codes else 128 - min(codes)
        assert self._poll is not None
        status = await self._poll.ask()
        if status is None:
            return None
        self._check_failed(status)
        if status.closing and status.view.state != types_pb2.JOB_STATE_RECOVERING:
            return None  # the last version is being made safe
        ours = {seat.child.pid for seat in self.workers}
        if any(one.pid in ours for one in _members(status)):
            return None  # a worker whose end is noticed in a moment
        if status.view.state == types_pb2.JOB_STATE_WAITING or status.view.state in _ENDED:
            return 0
        there = server_pids(status)
        if not all(seat.child.running and seat.child.pid in there for seat in self.servers):
            return None
        killed = [seat for seat in self.workers if seat.code is not None and seat.code < 0 and not seat.leaving]
        if killed and not status.view.main:
            return self._main_again(killed)
        going_back = status.view.state == types_pb2.JOB_STATE_RECOVERING
        went_back = going_back or self._was_finished or status.view.timeline > self._worked_on
        if status.finished or not went_back or "undone" in status.broken_promises:
            return 0
        self._say("the job has gone back after the workers had ended; they are started again")
        for seat in self.workers:
            if seat.code == 0 and not seat.leaving:
                self._seats.count(seat.name, 0, 1)
                seat.due, seat.code = time.monotonic(), None
        self._was_finished = False
        return None

    def _main_again(self, killed: list[Seat]) -> int | None:
        """The main worker was killed after training, and no other worker does what it was to do.

        Has the killed workers started again. Returns the exit code of the run if they are not to be.
        """
        names = ", ".join(seat.name for seat in killed)
        self._say(f"the main worker was killed before its script had come to its end ({names})")
        codes = [seat.code for seat in killed if seat.code is not None]
        if not self.restarts.most:
            return 128 - min(codes)
        for seat, code in zip(killed, codes, strict=True):
            self._again(seat, code)
            seat.code = None
        return None


def _members(status: coordinator_pb2.StatusResponse) -> list[coordinator_pb2.ProcessStatus]:
    """The workers that are members now; the status also lists workers that are gone."""
    members = {worker.member for worker in status.view.workers}
    return [one for one in status.processes if one.role == "worker" and one.member in members]
