"""A copy for a checkpoint is of its moment, whatever happens to the shard before it is written: for every optimizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paramserver.checkpoint.manifest import checkpoint_name
from paramserver.checkpoint.place import Inside, Place
from paramserver.checkpoint.tensorfile import FileInfo
from paramserver.core.layout.plan import Chunk, TensorSpec
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.names import SyncName
from paramserver.errors import CheckpointError, GoneError, ParamServerError, UnavailableError
from paramserver.frames import AnyFrame
from paramserver.server.saving.restoring import restore
from paramserver.server.saving.saver import Saver
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.version import Version
from paramserver.tensors.codec import chunk_frames
from paramserver.tensors.dtypes import buffer_of
from paramserver.tensors.hypers import groups_from_proto, groups_to_proto, optimizers_of
from paramserver.tensors.optimizers import describe
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.wire.messages import chunk_ref, plan_of, tensor_to_proto
from tests.support.states import exported
from tests.support.unit.checkpoints import manifest
from tests.support.unit.trained import OPTIMIZERS

SHAPES = {"a": (37, 5), "b": (11,), "c": (64,)}
BEFORE, AFTER = 3, 4
_NOBODY = UnavailableError("nobody answers")


class LatePlace(Place):
    """A directory that can be written to only after ``open`` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.open = threading.Event()

    def inside(self, checkpoint: str) -> Inside:
        assert self.open.wait(30.0), "nobody opened it"
        return super().inside(checkpoint)


class Shard:
    """One shard with three tensors in several chunks, and the saver of its checkpoints."""

    def __init__(
        self,
        place: Place,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        shards: int = 1,
        connect: Callable[[str], Any] = lambda address: pytest.fail("there is nobody else"),
        peers: Sequence[types_pb2.ShardInfo] = (),
    ) -> None:
        self.told = asyncio.Event()
        name, groups = describe(optimizer([torch.zeros(1)]))
        self.spec = types_pb2.ModelSpec(
            tensors=[tensor_to_proto(TensorSpec(key, shape, "float32")) for key, shape in SHAPES.items()],
            optimizer=types_pb2.OptimizerSpec(name=name, groups=groups_to_proto(groups)),
            chunk_bytes=256,
        )
        self.plan = plan_of(self.spec, shards)
        self.groups = tuple(groups_from_proto(self.spec.optimizer.groups))
        self.tensors = self.empty()
        self.state = ShardState(Consistency(Mode.SYNC))
        self.numbers = torch.Generator().manual_seed(1)
        chunks = {chunk.index: self.filled(chunk) for chunk in self.tensors.chunks}
        self.version = Version(0, self.tensors.chunks, chunks)
        config = shard_pb2.ConfigureRequest(shard=0, shards=shards, timeline=2, model=self.spec, peers=peers)
        self.saver = Saver(place, self.plan, config, connect, self.told.set)

    async def saved(self) -> shard_pb2.CopyStatus:
        """The status of the only copy, when it is written."""
        while True:
            (status,) = self.saver.statuses()
            if status.state != shard_pb2.COPY_STATE_WRITING:
                return status
            self.told.clear()
            await asyncio.wait_for(self.told.wait(), 30.0)

    def empty(self) -> ShardTensors:
        """As it is before anything is loaded."""
        return ShardTensors(self.plan.layout, self.plan.chunks_of(0), optimizers_of(self.spec.optimizer))

    def filled(self, chunk: Chunk) -> torch.Tensor:
        """Random numbers; padding is zero."""
        flat = torch.zeros(chunk.elements)
        for piece in chunk.pieces:
            numbers = torch.randn(piece.elements, generator=self.numbers)
            flat[piece.chunk_start : piece.chunk_start + piece.elements] = numbers
        return flat

    def step(self, used: frozenset[int] = frozenset((0, 1, 2))) -> None:
        """Apply a contribution."""
        chunks = {index: self.filled(chunk) for index, chunk in self.tensors.chunks_used(used).items()}
        number = self.version.number
        one = Contribution(SyncName(number, 0, 1, 1), 1, 1, False, number, used, self.groups, chunks)
        self.version = self.tensors.build(self.version, [one])


def content(tensors: ShardTensors, version: Version) -> list[tuple[object, ...]]:
    """Every number of a shard, as bytes."""
    found: list[tuple[object, ...]] = [(i, t.numpy().tobytes()) for i, t in sorted(version.tensors.items())]
    found += sorted((e[0], e[1], e[2], e[3].numpy().tobytes(), e[4]) for e in exported(tensors))
    return found


@pytest.mark.parametrize("hurry", [True, False], ids=["in a hurry", "at leisure"])
@pytest.mark.parametrize("began", [True, False], ids=["in use", "unused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_before_it_is_written_do_not_show(optimizer: str, began: bool, hurry: bool, tmp_path: Path) -> None:
    """The thread that writes comes to it four steps later; in the second of them only one tensor is used."""

    async def go() -> tuple[list[tuple[object, ...]], Shard, shard_pb2.CopyStatus]:
        place = LatePlace(str(tmp_path))
        shard = Shard(place, OPTIMIZERS[optimizer])
        for _ in range(BEFORE if began else 0):
            shard.step()
        wanted = content(shard.tensors, shard.version)
        assert shard.saver.take(shard.version, shard.tensors, shard.state, {}, hurry)
        for number in range(AFTER):
            shard.step(frozenset((1,)) if number == 1 else frozenset((0, 1, 2)))
        assert content(shard.tensors, shard.version) != wanted
        place.open.set()
        status = await shard.saved()
        await shard.saver.close()
        return wanted, shard, status

    wanted, shard, status = asyncio.run(go())
    assert status.state == shard_pb2.COPY_STATE_SAVED, status.reason
    version = BEFORE if began else 0
    assert status.version == version
    saved = manifest(
        version=version,
        timeline=2,
        layout_digest=shard.plan.layout.digest,
        weights=(file(status.weights),),
        state=(file(status.optimizer),),
    )
    tensors = shard.empty()
    restored, _ = restore(Place(str(tmp_path)), saved, shard.plan.layout, shard.spec.optimizer, tensors)
    assert content(tensors, restored) == wanted
    assert checkpoint_name(version, 2) in {path.name for path in tmp_path.iterdir()}


def test_what_is_used_is_not_kept(tmp_path: Path) -> None:
    """A chunk is there twice only between the step that changes it and its being written; nothing is after the end."""

    async def go() -> None:
        shard = Shard(Place(str(tmp_path)), OPTIMIZERS["adamw"])
        shard.step()
        wanted = {index: [e[3].clone() for e in state.export()] for index, state in shard.tensors.states.items()}
        copy = shard.tensors.copy_states()
        first, *others = wanted
        assert all(map(torch.equal, [e[3] for e in copy.use(first)], wanted[first]))
        assert not copy._copies
        shard.step()
        assert set(copy._copies) == set(others)
        for index in others:
            assert [e[:3] for e in copy.outline(index)] == [e[:3] for e in shard.tensors.states[index].export()]
            assert all(map(torch.equal, [e[3] for e in copy.use(index)], wanted[index]))
        assert not copy._copies
        left = shard.tensors.copy_states()
        shard.tensors.drop_copy(left)
        shard.step()
        assert not left._copies

    asyncio.run(go())


def file(saved: shard_pb2.SavedFile) -> FileInfo:
    return FileInfo(Path(saved.name).name, saved.bytes, saved.sha256)


def test_a_thread_that_waits_for_another_server_ends_with_its_own(tmp_path: Path) -> None:
    """The loop has ended before it came to the question: the thread must not wait for ever."""
    answers: list[BaseException] = []

    async def nothing() -> torch.Tensor:
        raise AssertionError("the loop has ended")

    async def go() -> Saver:
        return Shard(Place(str(tmp_path)), OPTIMIZERS["sgd"]).saver

    saver = asyncio.run(go())

    def wait() -> None:
        try:
            saver._wait_for(nothing())
        except CheckpointError as error:
            answers.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    assert [str(error) for error in answers] == ["this server has ended"]


def test_another_server_asks_for_a_copy_that_was_let_go(tmp_path: Path) -> None:
    """It is told at once: there will be none. Of a later version it is told that there is none yet."""

    async def go() -> None:
        shard = Shard(Place(str(tmp_path)), OPTIMIZERS["sgd"])
        chunk = shard.tensors.chunks[0].index
        with pytest.raises(UnavailableError):
            await shard.saver.copied(0, [chunk], wait_s=0.01)
        shard.saver.take(shard.version, shard.tensors, shard.state, {})
        assert len(await shard.saver.copied(0, [chunk])) == 1
        assert (await shard.saved()).state == shard_pb2.COPY_STATE_SAVED
        shard.saver.release([0])
        with pytest.raises(GoneError):
            await shard.saver.copied(0, [chunk])
        with pytest.raises(UnavailableError):
            await shard.saver.copied(1, [chunk], wait_s=0.01)
        await shard.saver.close()

    asyncio.run(go())


class Elsewhere:
    """A channel to the server of another shard, which fails with ``error`` or has the chunks that are asked for."""

    def __init__(self, shard: Shard | None, asked: asyncio.Event, error: ParamServerError = _NOBODY) -> None:
        self.shard, self.asked, self.error = shard, asked, error

    async def download(
        self, method: str, request: Any, timeout: float, place: Any = None
    ) -> AsyncGenerator[AnyFrame, None]:
        self.asked.set()
        if self.shard is None:
            raise self.error
        layout = self.shard.plan.layout
        parts = [
            (chunk_ref(layout.chunks[i]), buffer_of(torch.ones(layout.chunks[i].elements))) for i in request.chunks
        ]
        for raw in chunk_frames(None, parts):
            yield raw

    async def close(self) -> None:
        pass


def test_a_shard_moves_while_a_part_of_it_is_fetched(tmp_path: Path) -> None:
    """A tensor lies on two shards. The server of the other one dies, and another server has that shard."""

    async def go() -> shard_pb2.CopyStatus:
        asked = asyncio.Event()
        peers = [types_pb2.ShardInfo(index=1, address="dead")]
        found: dict[str, Elsewhere] = {"dead": Elsewhere(None, asked)}
        shard = Shard(Place(str(tmp_path)), OPTIMIZERS["sgd"], 2, found.__getitem__, peers)
        found["alive"] = Elsewhere(shard, asked)
        assert shard.saver.take(shard.version, shard.tensors, shard.state, {})
        await asyncio.wait_for(asked.wait(), 30.0)
        shard.saver.meet([types_pb2.ShardInfo(index=1, address="alive")])
        status = await shard.saved()
        await shard.saver.close()
        return status

    assert asyncio.run(go()).state == shard_pb2.COPY_STATE_SAVED


def test_another_server_had_no_room_for_its_copy(tmp_path: Path) -> None:
    """Then this copy is left out, too: the coordinator may have the same version copied once more."""

    async def go() -> shard_pb2.CopyStatus:
        full = Elsewhere(None, asyncio.Event(), GoneError("there is no copy of version 0 here"))
        peers = [types_pb2.ShardInfo(index=1, address="full")]
        shard = Shard(Place(str(tmp_path)), OPTIMIZERS["sgd"], 2, lambda address: full, peers)
        assert shard.saver.take(shard.version, shard.tensors, shard.state, {})
        status = await shard.saved()
        await shard.saver.close()
        return status

    status = asyncio.run(go())
    assert status.state == shard_pb2.COPY_STATE_SKIPPED
    assert status.reason == "server-1 has no such copy: there is no copy of version 0 here"
