"""Jobs with checkpoints whose processes die at places in the code, and are started again: `Rig` and `Strike`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context as Variables
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from google.protobuf.message import Message
from safetensors.torch import load_file

from paramserver import failpoints
from paramserver.checkpoint.catalog import complete, newest
from paramserver.checkpoint.place import Place
from paramserver.resume.options import Options
from paramserver.v1 import shard_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import Died, train, until, wait
from tests.support.cluster.processes import Killed, running_process
from tests.support.cluster.programs import Program
from tests.support.cluster.taps import Commands
from tests.support.failover.takeover import Chief, Fleet, Keeper, Script

# Between the death of a process and the start of the one in its place.
AGAIN_S = 0.05
# Small, so that every server has parameters.
CHUNK = 512


@dataclass(slots=True)
class Strike:
    """What happens when ``who`` ("server-1", "leader", "worker-0"; empty: whoever is first) reaches the place ``at``.

    ``step``: only there (None: at any). ``nth``: the so many times before pass. ``times``: how often it strikes.
    ``do``: "kill", "error", or a function that is called instead; ``also``: processes that are killed with it.
    """

    at: str
    who: str = ""
    step: int | None = None
    nth: int = 0
    times: int = 1
    do: str | Callable[[], object] = "kill"
    also: tuple[str, ...] = ()
    seen: int = 0
    fired: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def due(self, name: str, who: str, step: int) -> bool:
        """Whether it strikes now. Counts."""
        if name != self.at or (self.who and who != self.who) or self.step not in (None, step):
            return False
        self.seen += 1
        if self.seen <= self.nth or self.fired >= self.times:
            return False
        self.fired += 1
        self.done.set()
        return True


class Rig(Fleet):
    """A fleet that keeps checkpoints in ``place`` and starts again whatever is killed by a strike.

    While it is open its strikes are armed: no two at the same time.
    """

    def __init__(
        self,
        place: Path,
        every: int,
        strikes: Sequence[Strike] = (),
        places: Sequence[str] = ("leader",),
        **options: Any,
    ) -> None:
        self.saved = place / "final.safetensors"
        super().__init__(
            places=places,
            checkpoint__dir=str(place / "ckpt"),
            checkpoint__every=every,
            run__save=str(self.saved),
            **{"training__chunk_bytes": CHUNK, **options},
        )
        self.checkpoints = place / "ckpt"
        self.strikes = list(strikes)
        self.commands = self.orders = Orders()
        # Who was killed, in order.
        self.deaths: list[str] = []
        # How servers are started again, and coordinators.
        self.again_s = AGAIN_S
        # Nobody is started again any more.
        self._lock = threading.Lock()
        self.ending = False

    def __enter__(self) -> Rig:
        super().__enter__()
        failpoints.arm(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending = True
        failpoints.arm(None)
        super().__exit__(kind, error, trace)

    # ---- what failpoints ask

    def reached(self, name: str, step: int) -> None:
        """See `failpoints.Plan`."""
        who, dead = self._who()
        if dead:
            raise Killed
        with self._lock:
            struck = next((strike for strike in self.strikes if strike.due(name, who, step)), None)
        if struck is None:
            return
        if callable(struck.do):
            struck.do()
        elif struck.do == "error":
            raise OSError(5, f"an error, as planned at {name}")
        else:
            for other in struck.also:
                self._at_once(lambda other=other: self.strike(other))  # type: ignore[misc]
            if who.startswith("worker"):
                raise Died
            self._at_once(lambda: self.strike(who))
            raise Killed

    def plans(self, name: str) -> bool:
        """See `failpoints.Plan`."""
        return any(strike.at == name for strike in self.strikes)

    def touched(self, writes: bool) -> None:
        """See `failpoints.Plan`."""

    def through(self, channel: Any) -> Any:
        """See `failpoints.Plan`."""
        return channel

    def named(self, name: str) -> None:
        """See `failpoints.Plan`."""

    def _who(self) -> tuple[str, bool]:
        """The process whose code runs here, and whether it is dead."""
        process = running_process()
        if process is not None:
            return process.name, process.killed
        thread = threading.current_thread()
        for keeper in list(self.keepers):
            shards = [service.host.shard for service in keeper.service.shards.values()]
            savers = [shard.saver for shard in shards if shard is not None and shard.saver is not None]
            if any(thread in pool._threads for pool in (keeper.service.process.pool, *(s._thread for s in savers))):
                return keeper.address, keeper.process.killed
        return thread.name, False

    # ---- dying and beginning again

    def _at_once(self, work: Callable[[], None]) -> None:
        """In the loop: now, if this is its thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.background.loop.call_soon_threadsafe(work)
        else:
            work()

    def strike(self, who: str) -> None:
        """Kill a server or the coordinator, and start another one soon. In the loop."""
        victim: Keeper | Chief
        living: list[Keeper | Chief]
        if who.startswith("server"):
            living = [keeper for keeper in self.keepers if keeper.address == who and not keeper.process.killed]
        else:
            living = [chief for chief in self.chiefs if not chief.process.killed and not chief.task.done()]
        if not living:
            return
        victim = living[-1]
        self.deaths.append(who)
        victim.die()
        self.network.hang_up(victim.process.out)
        asyncio.get_running_loop().call_later(self.again_s, self._start_again, victim, context=Variables())

    def _start_again(self, dead: Keeper | Chief) -> None:
        if self.ending:
            return
        if isinstance(dead, Keeper):
            self.keepers.append(Keeper(self, dead.index, dead.address, (), replaces=[dead.pid]))
        else:
            self.chiefs.append(Chief(self, dead.place, Options(resume=True), self.settings))

    def kill_now(self, *names: str) -> None:
        """From another thread."""
        for name in names:
            self.call(lambda name=name: self.strike(name))  # type: ignore[misc]

    def goes_back(self, name: str = "server-1") -> None:
        """Kill a server, and wait until the job went back to a checkpoint."""
        self.kill_now(name)
        until("the job went back", lambda: self.rollbacks)

    # ---- looking

    def until_saved(self, version: int) -> None:
        """Wait until the checkpoint of this version is complete."""

        def there() -> bool:
            found = newest(Place(str(self.checkpoints)), verify=False)
            return found is not None and found.version >= version

        until(f"the checkpoint of version {version} is complete", there, 60.0)

    def join_all(self) -> None:
        """Wait for all workers, those that begin meanwhile included."""
        joined = 0
        while joined < len(self.hands):
            joined = len(self.hands)
            self.join()

    def end_at(self, stop: Stop, kept: int) -> None:
        """All servers die once the workers are held by ``stop`` and there is a checkpoint of version ``kept`` or later.

        Nobody is started again, and the workers are let go: the job can be resumed.
        """
        wait(stop.reached, f"version {stop.version}")
        there = Place(str(self.checkpoints))
        until("the checkpoint", lambda: any(manifest.version >= kept for manifest in complete(there)))
        for server in list(self.keepers):
            self.call(server.die)
        self.ending = True
        stop.released.set()

    def finish(self, *args: Any) -> Mapping[str, Any]:
        """As `Fleet.finish`; also: every strike has struck, and no timeline was used twice."""
        summary = super().finish(*args)
        idle = [f"{strike.who} at {strike.at} {strike.step}" for strike in self.strikes if not strike.fired]
        assert not idle, f"planned strikes that never came: {idle}"
        self.orders.check_timelines()
        return summary

    @property
    def rollbacks(self) -> int:
        """How often the job went back, as the record has it."""
        return self.record().rollbacks

    def final(self, name: str) -> torch.Tensor:
        """A tensor of the result."""
        found: torch.Tensor = load_file(self.saved)[name]
        return found


class Orders(Commands):
    """Also the timelines that shards were told to begin."""

    def __init__(self) -> None:
        super().__init__()
        # (address, term, timeline, version or -1)
        self.timelines: list[tuple[str, int, int, int]] = []

    def take(self, address: str, request: Message) -> None:
        """See `Commands`."""
        super().take(address, request)
        if isinstance(request, shard_pb2.RestoreRequest):
            configure = request.configure
            version = int(json.loads(request.manifest)["version"])
            self.timelines.append((address, configure.term, configure.timeline, version))
        elif isinstance(request, shard_pb2.ConfigureRequest) and request.anew and not request.backup:
            self.timelines.append((address, request.term, request.timeline, -1))

    def begun_with(self) -> int:
        """The version that the first timeline began with, -1: with no checkpoint."""
        return self.timelines[0][3]

    def check_timelines(self) -> None:
        """Each server begins a timeline once, and they rise; a timeline belongs to one coordinator."""
        terms: dict[int, int] = {}
        newest: dict[str, int] = {}
        for address, term, timeline, _ in self.timelines:
            assert terms.setdefault(timeline, term) == term, f"timeline {timeline} of two terms: {self.timelines}"
            assert timeline > newest.get(address, 0), f"{address} begins timeline {timeline} again: {self.timelines}"
            newest[address] = timeline


_twins: dict[tuple[object, ...], Mapping[str, Any]] = {}


def twin(key: str, script: Script, chunk_bytes: int = CHUNK, **options: Any) -> Mapping[str, Any]:
    """The summary of the same training undisturbed, in one worker and one server. Worked out once for a ``key``."""
    where = (key, chunk_bytes, *sorted(options.items()))
    if where not in _twins:
        _twins[where] = train(script, settings={"training.chunk_bytes": chunk_bytes}, **options).summary
    return _twins[where]


SAME = ("weights_sha256", "optimizer_sha256", "buffers_sha256", "steps", "contributions_applied", "steps_skipped")


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Not one bit differs."""
    differ = {key: (found[key], wanted[key]) for key in SAME if found[key] != wanted[key]}
    assert not differ, f"found and wanted: {differ}"


def steps_of(program: Program, slices_per_step: int) -> int:
    """How many steps the program takes in all."""
    slices = -(-len(program.data) // program.batch_size)  # type: ignore[arg-type]
    return program.epochs * -(-slices // slices_per_step)


class Stop:
    """Holds the workers once the job has come to a version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, ctx: Context, slices: int) -> None:
        if ctx.version >= self.version:
            self.reached.set()
            wait(self.released, "the end of the test", 60.0)
