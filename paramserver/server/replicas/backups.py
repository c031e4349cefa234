"""The backups of a shard, as its primary sees them: what each of them has, and what it is sent, in order.

A new backup *catches up*: the primary sends it the shard, some chunks at a time, while training goes on. Each chunk is
sent as it is in some version. From then on the backup is also sent what the next versions of this chunk are made of. So
all chunks at a backup are of one version at any time, and nothing has to be kept until the last chunk is there.

Lives in the event loop. A version is published when all backups hold what it is made of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import structlog

from paramserver import errors
from paramserver.core.layout.catching_up import groups, pause_s
from paramserver.core.layout.plan import Chunk
from paramserver.failpoints import reach
from paramserver.server.replicas.backup import Backup, Place
from paramserver.server.replicas.outbox import Content, Outbox, private
from paramserver.server.replicas.parcels import CatchUpParcel, DraftParcel, ForwardParcel, MadeParcel, Parcel
from paramserver.server.versions.drafting import Draft, Drafting
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.server")

_BACK_OFF_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_SAY_S = 5.0


class Source(Protocol):
    """The shard at its primary, from which backups get chunks and versions."""

    @property
    def chunks(self) -> Mapping[int, Chunk]:
        """All chunks of the shard, by their index."""

    @property
    def job(self) -> str:
        """The name of the job."""

    @property
    def timeline(self) -> int:
        """The timeline of the shard."""

    @property
    def making(self) -> bool:
        """Whether a version is being made."""

    def catch_up(self, chunks: Sequence[Chunk], last: bool) -> CatchUpParcel:
        """These chunks as they are now, with no version in the making; ``last``: and all facts beside the tensors."""


class Backups:
    """``fenced`` is called when a backup says that this server is not the primary any more."""

    def __init__(
        self,
        source: Source,
        connect: Callable[[str], Channel],
        wait_s: float,
        fenced: Callable[[str], None],
        told: Callable[[], None],
        outbox: Outbox | None = None,
    ) -> None:
        """``wait_s``: the longest wait for a backup. ``told`` is called when a backup has all of the shard.

        ``outbox``: memory that backups on this host may read.
        """
        self.placement = 0
        # In words, the backups for which the next version waits.
        self.waiting_for = ""
        self._source, self._connect, self._wait_s = source, connect, wait_s
        self._fenced, self._told = fenced, told
        self._mbps = 0.0
        self._outbox = outbox
        self._backups: dict[Place, Backup] = {}
        # Shards of a new plan that want chunks of this one, by the number of the plan and their own number.
        self._feeds: dict[tuple[int, int], Backup] = {}
        # What is to be done when no version is in the making.
        self._at_rest: list[Callable[[], None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    # ---- which there are

    @property
    def follow(self) -> bool:
        """Whether any backup needs what the next version is made of. That begins only between two versions."""
        return any(one.begun for one in self._all())

    def _all(self) -> list[Backup]:
        return [*self._backups.values(), *self._feeds.values()]

    def tell(self, placement: int, places: Sequence[Place], mbps: float, whole: Collection[Place] = ()) -> None:
        """These are the backups. New ones catch up, at ``mbps`` megabits a second at most (0: no limit).

        ``whole``: backups that have all of the shard when they are first heard of.
        """
        if placement < self.placement:
            return
        self.placement, self._mbps = placement, mbps
        for place in set(self._backups) - set(places):
            self._drop(self._backups.pop(place))
        for place in places:
            if place not in self._backups:
                self._begin(place, place in whole)

    def feed(self, request: shard_pb2.FeedRequest) -> None:
        """A shard of a new plan wants these chunks, and then what they are made of. May be repeated.

        It has to hold what a version is made of, as backups have. So it is at the version of this shard whenever this
        shard is at rest.
        """
        key = request.plan, request.feed
        if key not in self._feeds:
            wants = [self._source.chunks[index] for index in request.chunks]
            place = request.address, request.plan
            one = Backup(place, self._connect(request.address), wants, request.repair_mbps, request.feed)
            self._feeds[key] = one
            one.tasks = [asyncio.create_task(self._deliver(one)), asyncio.create_task(self._catch_up(one))]

    def settled(self, plan: int) -> None:
        """Plans up to this one are in force or given up: their shards want nothing any more."""
        for key in [key for key in self._feeds if key[0] <= plan]:
            self._drop(self._feeds.pop(key))

    def statuses(self) -> list[shard_pb2.BackupStatus]:
        """How far the backups are."""
        chunks = self._source.chunks
        of = sum(chunk.nbytes for chunk in chunks.values())
        return [
            shard_pb2.BackupStatus(
                place=shard_pb2.BackupPlace(address=one.place[0], since=one.place[1]),
                bytes=sum(chunks[index].nbytes for index in one.has),
                of=of,
                whole=one.whole,
            )
            for one in self._backups.values()
        ]

    def _begin(self, place: Place, whole: bool = False) -> None:
        chunks = [*self._source.chunks.values()]
        backup = self._backups[place] = Backup(place, self._connect(place[0]), chunks, self._mbps)
        backup.tasks = [asyncio.create_task(self._deliver(backup))]
        if whole:
            backup.has, backup.begun, backup.whole = set(self._source.chunks), True, True
        else:
            backup.tasks.append(asyncio.create_task(self._catch_up(backup)))

    def _drop(self, backup: Backup) -> None:
        """This backup is given up: its tasks end, and versions that waited for it go on."""
        for task in backup.tasks:
            task.cancel()
        for done in backup.waiting:
            if not done.done():
                done.set_result(None)
        if backup.loan is not None:
            self._in_background(backup.loan.channel.close())
        self._in_background(backup.channel.close())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Send nothing any more."""
        tasks = [task for backup in self._all() for task in backup.tasks]
        for backup in self._all():
            self._drop(backup)
        self._backups.clear()
        self._feeds.clear()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        if self._outbox is not None:
            await self._outbox.close()

    # ---- versions

    def content(self, version: int) -> Content:
        """Memory for what the version after ``version`` is made of. ``version`` is published."""
        return self._outbox.content(lambda: self._made(version)) if self._outbox is not None else private()

    async def _made(self, version: int) -> None:
        """Return when all backups have made ``version``, and read nothing in the outbox.

        Raises DeadlineError that names the backups, and FencedError if this server is not the primary any more.
        """
        readers = {one.address: one.reading for one in self._backups.values() if one.reading is not None}
        if any(not future.done() for future in readers.values()):
            self.waiting_for = f"the backups {', '.join(readers)} to make version {version}"
            await asyncio.wait(readers.values(), timeout=self._wait_s)
            self.waiting_for = ""
        if late := [address for address, future in readers.items() if not future.done()]:
            raise errors.DeadlineError(
                f"waited {self._wait_s:g} s for the backups at {', '.join(late)} to make version {version}"
            )
        for future in readers.values():
            future.result()

    def ahead(self, header: shard_pb2.ForwardHeader, draft: Draft, drafting: Drafting) -> None:
        """Send the backups that cannot read the outbox what a draft is made of, as it is made."""
        header.placement = self.placement
        for backup in self._backups.values():
            if backup.whole and not (backup.loan is not None and backup.loan.good):
                backup.ahead = DraftParcel(header, self._source.chunks, draft, drafting, self._wait_s)
                self._put(backup, backup.ahead)

    def forward(self, header: shard_pb2.ForwardHeader, content: Content) -> Awaitable[None]:
        """Send the backups what the next version is made of; wait for the answer, and all of them hold it.

        Raises DeadlineError that names the backups.
        """
        header.placement = self.placement
        waits = []
        for backup in self._all():
            if backup.begun:
                parts = {index: tensor for index, tensor in content.chunks.items() if index in backup.has}
                ahead = backup.ahead if backup.ahead is not None and backup.ahead.content is content else None
                backup.ahead = None
                parcel = ForwardParcel(header, self._source.chunks, parts, content.lent, ahead, backup.feed)
                waits.append((backup, self._put(backup, parcel)))
                if content.lent and not backup.feed:
                    backup.reading = self._put(backup, MadeParcel(header))
                    backup.reading.add_done_callback(_looked_at)
        return self._held(header.version, waits)

    async def _held(self, version: int, waits: Sequence[tuple[Backup, asyncio.Future[None]]]) -> None:
        if not waits:
            return
        reach("forward.before_ack", version)
        futures = [future for _, future in waits]
        self.waiting_for = f"version {version + 1} at the backups {', '.join(one.address for one, _ in waits)}"
        try:
            async with asyncio.timeout(self._wait_s):
                await asyncio.gather(*futures)
        except TimeoutError as error:
            late = ", ".join(one.address for one, future in waits if not future.done())
            raise errors.DeadlineError(
                f"waited {self._wait_s:g} s for the backups at {late} to hold version {version + 1}"
            ) from error
        finally:
            self.waiting_for = ""
        reach("forward.after_ack", version)

    def between(self) -> None:
        """No version is in the making just now; the next one may be begun when this returns."""
        todo, self._at_rest = self._at_rest, []
        for work in todo:
            work()

    # ---- catching up

    async def _catch_up(self, backup: Backup) -> None:
        parts = groups(backup.wants, begins=lambda chunk: chunk.leads)
        began = time.monotonic()
        sent = 0
        for number, group in enumerate(parts):
            last = not backup.feed and number + 1 == len(parts)
            parcel, done = await self._when_at_rest(backup, group, last)
            await done
            sent += parcel.nbytes
            reach("catch_up.after_chunks", parcel.header.version)
            if backup.mbps:
                await asyncio.sleep(pause_s(sent, time.monotonic() - began, backup.mbps))
        backup.whole = True
        log.info("a backup has all of the shard", at=backup.address, bytes=sent, after_s=_since(began))
        self._told()

    async def _when_at_rest(
        self, backup: Backup, group: Sequence[Chunk], last: bool
    ) -> tuple[CatchUpParcel, asyncio.Future[None]]:
        ready: asyncio.Future[tuple[CatchUpParcel, asyncio.Future[None]]] = asyncio.get_running_loop().create_future()

        def now() -> None:
            if ready.cancelled():
                return
            parcel = self._source.catch_up(group, last)
            parcel.header.placement, parcel.header.first = self.placement, not backup.begun
            parcel.header.feed = backup.feed
            backup.begun = True
            backup.has.update(chunk.index for chunk in group)
            ready.set_result((parcel, self._put(backup, parcel)))

        if self._source.making:
            self._at_rest.append(now)
        else:
            now()
        return await ready

    def _again(self, backup: Backup) -> None:
        """The backup has begun anew, and has nothing: bring it all of the shard. A feed is not wanted any more."""
        if backup.feed:
            self._unwanted(backup, "it does not want these chunks any more")
            return
        log.warning("a backup has begun anew", at=backup.address)
        self._drop(backup)
        self._begin(backup.place)

    def _unwanted(self, feed: Backup, reason: str) -> None:
        log.info("a shard of a new plan is brought nothing any more", at=feed.address, reason=reason)
        self._feeds.pop((feed.place[1], feed.feed), None)
        self._drop(feed)

    # ---- sending, in order

    def _put(self, backup: Backup, parcel: Parcel) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        backup.waiting.add(done)
        done.add_done_callback(backup.waiting.discard)
        backup.queue.put_nowait((parcel, done))
        return done

    async def _deliver(self, backup: Backup) -> None:
        """Send what is in the queue, each until the backup has it."""
        if not backup.feed:
            await self._lend(backup)
        while True:
            parcel, done = await backup.queue.get()
            if not await self._insist(backup, parcel):
                return
            del parcel  # its tensors are not to stay until the next one is there
            if not done.done():
                done.set_result(None)

    async def _lend(self, backup: Backup) -> None:
        """Let the backup read the outbox if it is on this host. Otherwise it is sent everything."""
        source, tries = self._source, 0
        while self._outbox is not None:
            try:
                backup.loan = await self._outbox.lend(backup.channel, source.job, source.timeline, self.placement)
                return
            except (errors.UnavailableError, errors.DeadlineError):  # as for everything else that it is sent
                await asyncio.sleep(_BACK_OFF_S[min(tries, len(_BACK_OFF_S) - 1)])
                tries += 1
            except errors.ParamServerError as error:
                log.info("versions go over the network to a backup", at=backup.address, reason=str(error))
                return

    async def _insist(self, backup: Backup, parcel: Parcel) -> bool:
        """Send until the backup has it; False if that will never be."""
        tries, said = 0, 0.0
        while True:
            try:
                await parcel.send(backup.channel, backup.loan)
                return True
            except errors.GoneError:
                self._again(backup)
                return False
            except errors.FencedError as error:
                if backup.feed:
                    self._unwanted(backup, str(error))
                    return False
                self._fenced(str(error))
                for done in list(backup.waiting):
                    done.set_exception(error)
                return False
            except errors.ParamServerError as error:
                if time.monotonic() - said > _SAY_S:
                    said = time.monotonic()
                    log.info("trying again to reach a backup", at=backup.address, reason=str(error))
                await asyncio.sleep(_BACK_OFF_S[min(tries, len(_BACK_OFF_S) - 1)])
                tries += 1


def _looked_at(future: asyncio.Future[None]) -> None:
    """Its error is known, also if nobody waits for it."""
    if not future.cancelled():
        future.exception()


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)
