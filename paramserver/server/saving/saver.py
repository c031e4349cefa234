"""A shard's part of the checkpoints: copies of versions, taken in passing and written beside training.

Weights need no copy, since a version never changes. The optimizer state is copied chunk by chunk: by the thread that
writes, or by the step that is about to change a chunk, whichever comes first; what is written is let go of. A tensor is
written whole, by the server that has its first element; what lies on other shards is fetched from their copies of the
same version.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import itertools
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import structlog
import torch

from paramserver import errors
from paramserver.checkpoint.contents import runs_to_json
from paramserver.checkpoint.manifest import COPIES_KEPT, checkpoint_name
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.tensorfile import FileInfo, write_tensors
from paramserver.core.layout.plan import Chunk, Kind, Plan
from paramserver.frames import Frame
from paramserver.server.saving.contents import Contents, Copy
from paramserver.server.versions.version import Version
from paramserver.tensors.codec import chunk_frames, split_frame
from paramserver.tensors.dtypes import buffer_of, tensor_from
from paramserver.tensors.finite import is_finite
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.wire.messages import chunk_ref

if TYPE_CHECKING:
    from paramserver.core.shards.shard import ShardState
    from paramserver.server.versions.shard import ShardTensors

log = structlog.get_logger("paramserver.server")

_FETCH_S = 120.0
_CALL_S = 30.0
_RETRY_S = 0.1
_LOOK_S = 0.5


class _NotCopiedError(errors.CheckpointError):
    """Another server has not copied the version. A later copy of the same version may go well."""


class Saver:
    """The copies of one shard on one timeline. Lives in one event loop; writes in a thread of its own."""

    def __init__(
        self,
        place: Place,
        plan: Plan,
        config: shard_pb2.ConfigureRequest,
        connect: Callable[[str], Channel],
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """``connect`` opens a channel to another server; ``told`` is called when the status of a copy has changed."""
        self.every = config.checkpoint_every
        self.write_s = 0.0
        self._place, self._plan, self._config = place, plan, config
        self._connect, self.told = connect, told
        self._peers = {peer.index: peer.address for peer in config.peers if peer.index != config.shard}
        self._channels: dict[int, Channel] = {}
        # Channels to servers that hold their shards no more.
        self._left: list[Channel] = []
        self._copies: dict[int, Copy] = {}
        self._skipped: dict[int, shard_pb2.CopyStatus] = {}
        # Versions that are not made yet, and will be copied then.
        self._ahead: set[int] = set()
        # Versions that were named in advance, until they are released.
        self._named: set[int] = set()
        # The newest version of which a copy was taken or skipped.
        self._newest = -1
        self._news = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._contents = Contents(plan, config.shard, self._chunk)
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def meet(self, peers: Iterable[types_pb2.ShardInfo]) -> None:
        """The shards are at these addresses from now on."""
        for peer in peers:
            if peer.index != self._config.shard and self._peers.get(peer.index) != peer.address:
                self._peers[peer.index] = peer.address
                if (former := self._channels.pop(peer.index, None)) is not None:
                    self._left.append(former)

    def begin_at(self, version: int) -> None:
        """This server saves the shard from ``version`` on; there will be no copy of an earlier one."""
        self._newest = max(self._newest, version - 1)

    # ---- taking and letting go

    @property
    def room(self) -> bool:
        """Whether another copy may be taken."""
        return len(self._copies) < COPIES_KEPT

    def due(self, version: int) -> bool:
        """Whether a checkpoint of this version is due. Synchronous shards take a copy by themselves then."""
        return self.every > 0 and version % self.every == 0

    def copies(self, version: int) -> bool:
        """Whether this version is copied when it is made."""
        return self.due(version) or version in self._named

    def copy_ahead(self, version: int) -> None:
        """A synchronous shard will copy this version, which it has not made yet."""
        self._ahead.add(version)
        self._named.add(version)

    def asked_for(self, version: int) -> bool:
        """Whether this version was named in advance. Versions up to this one count as made from now on."""
        asked = version in self._ahead
        self._ahead = {other for other in self._ahead if other > version}
        return asked

    def take(
        self,
        version: Version,
        tensors: ShardTensors,
        state: ShardState,
        names: Mapping[int, str],
        hurry: bool = True,
    ) -> bool:
        """Copy the newest version; False (and the status says so) if too many copies are not released yet.

        ``hurry``: the next step is expected before it is written.
        """
        number = version.number
        if number in self._copies:
            return not self._copies[number].released
        status = shard_pb2.CopyStatus(
            timeline=self._config.timeline, version=number, revision=state.consistency.revision
        )
        if not self.room:
            status.state, status.reason = shard_pb2.COPY_STATE_SKIPPED, "earlier checkpoints are still being written"
            self._skipped[number] = status
            self._newest = max(self._newest, number)
            self.told()
            return False
        status.state = shard_pb2.COPY_STATE_WRITING
        self._skipped.pop(number, None)
        self._newest = max(self._newest, number)
        facts, rows = _facts(number, tensors, state), state.ledger.rows()
        copy = Copy(version, tensors.copy_states(), facts, rows, dict(names), status, hurry=hurry)
        self._copies[number] = copy
        copy.task = asyncio.create_task(self._save(copy, tensors))
        return True

    def release(self, versions: Sequence[int]) -> None:
        """Copies of these versions are of no use any more."""
        for number in versions:
            self._ahead.discard(number)
            self._named.discard(number)
            self._skipped.pop(number, None)
            copy = self._copies.get(number)
            if copy is not None and copy.status.state != shard_pb2.COPY_STATE_WRITING:
                del self._copies[number]
            elif copy is not None:
                copy.released = True

    def statuses(self) -> list[shard_pb2.CopyStatus]:
        """The states of the copies, oldest first."""
        return [
            status
            for _, status in sorted({**self._skipped, **{n: copy.status for n, copy in self._copies.items()}}.items())
        ]

    async def _save(self, copy: Copy, tensors: ShardTensors) -> None:
        async with self._news:
            self._news.notify_all()
        started = time.monotonic()
        status = copy.status
        try:
            await self._loop.run_in_executor(self._thread, lambda: self._write(copy, tensors))
            status.state = shard_pb2.COPY_STATE_SAVED
        except _NotCopiedError as error:
            status.state, status.reason = shard_pb2.COPY_STATE_SKIPPED, str(error)
        except Exception as error:  # the top of a task: training goes on without this checkpoint
            if not isinstance(error, errors.ParamServerError):
                log.exception("a checkpoint could not be written", version=copy.version.number)
            status.state, status.reason = shard_pb2.COPY_STATE_FAILED, str(error)
        finally:
            if copy.released:
                del self._copies[copy.version.number]
            tensors.drop_copy(copy.states)
            self.write_s += time.monotonic() - started
            self.told()

    # ---- writing, in the thread

    def _write(self, copy: Copy, tensors: ShardTensors) -> None:
        number, config = copy.version.number, self._config
        parameters = [c for c in self._plan.chunks_of(config.shard) if c.kind is Kind.PARAMETER]
        leading = [chunk for chunk in parameters if chunk.leads]
        if copy.hurry:
            for chunk in leading:
                copy.states.keep(chunk.index)
        where = checkpoint_name(number, config.timeline)
        part = f"{config.shard + 1:05d}-of-{config.shards:05d}.safetensors"
        mine = self._contents.mine()
        weights = write_tensors(
            self._place,
            where,
            f"model-{part}",
            self._contents.entries(mine),
            self._contents.values(copy, mine),
            self._contents.names(mine),
            number,
        )
        entries = [*self._contents.state_entries(copy, leading), *self._contents.other_entries(copy, mine)]
        data = itertools.chain(self._contents.state_values(copy, leading), self._contents.other_values(copy, mine))
        facts = {"shard": copy.facts, "names": json.dumps(copy.names)}
        optimizer = write_tensors(self._place, where, f"optimizer-{part}", entries, data, facts, number)
        copy.status.weights.CopyFrom(_saved(weights))
        copy.status.optimizer.CopyFrom(_saved(optimizer))
        copy.status.finite = all(is_finite(copy.version.tensors[chunk.index]) for chunk in parameters)

    _fetched: tuple[int, int, torch.Tensor] | None = None

    def _chunk(self, copy: Copy, chunk: Chunk) -> torch.Tensor:
        own = copy.version.tensors.get(chunk.index)
        if own is not None:
            return own
        number = copy.version.number
        if self._fetched is None or self._fetched[:2] != (number, chunk.index):
            self._fetched = (number, chunk.index, self._wait_for(self._fetch(copy, chunk)))
        return self._fetched[2]

    def _wait_for(self, fetching: Coroutine[Any, Any, torch.Tensor]) -> torch.Tensor:
        """In the thread, which must not outlive a loop that has ended. Raises CheckpointError if it has."""
        try:
            future = asyncio.run_coroutine_threadsafe(fetching, self._loop)
        except RuntimeError as error:  # the loop is closed
            fetching.close()
            raise errors.CheckpointError("this server has ended") from error
        while not concurrent.futures.wait([future], _LOOK_S).done:
            if self._closed or self._loop.is_closed():
                future.cancel()
                if inspect.getcoroutinestate(fetching) == inspect.CORO_CREATED:
                    fetching.close()
                raise errors.CheckpointError("this server ends, or goes back to an earlier checkpoint")
        return future.result()

    # ---- between servers

    async def _fetch(self, copy: Copy, chunk: Chunk) -> torch.Tensor:
        """A chunk of another server's copy of the same version. Raises CheckpointError if it cannot be had."""
        version = copy.version.number
        server = self._plan.owner[chunk.index]
        request = shard_pb2.CopiedRequest(
            job=self._config.job, timeline=self._config.timeline, version=version, chunks=[chunk.index]
        )
        deadline = time.monotonic() + _FETCH_S
        while True:
            channel = self._channels.get(server)  # another one after the shard has moved
            if channel is None:
                channel = self._channels[server] = self._connect(self._peers[server])
            try:
                async with aclosing(channel.download("Shard.Copied", request, timeout=_CALL_S)) as frames:
                    async for raw in frames:
                        for ref, data in split_frame(raw)[1]:
                            if isinstance(ref, shard_pb2.ChunkRef) and ref.index == chunk.index:
                                return tensor_from(data, chunk.dtype)
                raise errors.CheckpointError(f"server-{server} did not send chunk {chunk.index} of version {version}")
            except errors.RetryableError as error:
                if copy.released:
                    raise _NotCopiedError("not all servers have copied that version") from error
                if time.monotonic() > deadline:
                    raise errors.CheckpointError(f"server-{server} does not give its part: {error}") from error
                await asyncio.sleep(_RETRY_S)
            except errors.StaleViewError as error:
                raise _NotCopiedError(f"server-{server} has no such copy: {error}") from error

    async def copied(self, version: int, chunks: Sequence[int], wait_s: float = 1.0) -> list[Frame]:
        """Frames with these chunks of the copy of ``version``, waiting for it if it has not been taken yet.

        Raises GoneError if there is none and will be none, UnavailableError if it does not come in time.
        """
        try:
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(lambda: version in self._copies or version <= self._newest)
        except TimeoutError as error:
            raise errors.UnavailableError(f"version {version} has not been copied here yet") from error
        copy = self._copies.get(version)
        if copy is None:
            raise errors.GoneError(f"there is no copy of version {version} here")
        layout = self._plan.layout
        if len({*chunks}) != len(chunks):
            raise errors.ProtocolError("a chunk was asked for twice")
        if any(index not in copy.version.tensors for index in chunks):
            raise errors.ProtocolError("a chunk was asked for that does not lie on this server")
        parts = [(chunk_ref(layout.chunks[index]), buffer_of(copy.version.tensors[index])) for index in chunks]
        return list(chunk_frames(None, parts))

    async def close(self) -> None:
        """Give up the copies that are not written yet."""
        self._closed = True
        tasks = [copy.task for copy in self._copies.values() if copy.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(
            *(channel.close() for channel in (*self._channels.values(), *self._left)), return_exceptions=True
        )
        self._thread.shutdown(wait=False, cancel_futures=True)


def _saved(info: FileInfo) -> shard_pb2.SavedFile:
    return shard_pb2.SavedFile(name=info.name, bytes=info.bytes, sha256=info.sha256)


def _facts(version: int, tensors: ShardTensors, state: ShardState) -> str:
    """The state of a shard beside its tensors, as JSON; equal on all shards of a consistent cut."""
    return json.dumps(
        {
            "version": version,
            "applied": state.counters.applied,
            "skipped": tensors.skipped,
            "samples": tensors.samples,
            "advances": tensors.advances,
            "ever_used": sorted(tensors.ever_used),
            "mode": state.consistency.mode.value,
            "revision": state.consistency.revision,
            "folded_steps": state.ledger.folded_steps,
            "counted": runs_to_json(state.counted()),
        }
    )


def place_of(config: shard_pb2.ConfigureRequest) -> Place | None:
    """Where this job keeps checkpoints, None if nowhere."""
    return Place(config.checkpoints) if config.checkpoints else None
