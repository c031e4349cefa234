"""What a copy of a shard takes, in bytes of tensors: see the table in docs/design.md."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paramserver.core.layout.plan import Chunk, TensorSpec, make_layout, make_plan
from paramserver.server import making
from paramserver.server.running import RunningShard
from paramserver.server.versions.version import Version, again
from tests.support.cluster.memory import Tensors
from tests.support.cluster.programs import Optimizer, Program, plain
from tests.support.failover.rollback import Rig

# One tensor of 2 MiB in 16 chunks: each of two servers has half of it.
SIDE, CHUNK_BYTES = 1024, 128 << 10
WEIGHTS = SIDE * SIDE // 2 * 4
STEPS, FROM = 6, 3
# By optimizer: how many times as large its state is as the weights.
STATE: dict[Optimizer, int] = {plain: 0, torch.optim.AdamW: 2}
# For small tensors of all kinds.
SLACK = WEIGHTS // 16


class Most:
    """The most that there was at any moment at which a server computes, or hands in what it has computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.looks, self.tensors = 0, 0, Tensors()
        most, arithmetic = self, RunningShard.arithmetic

        async def watched(self: RunningShard, work: Callable[[], Any]) -> Any:
            if self.state.version < FROM:
                return await arithmetic(self, work)
            made = await arithmetic(self, work)
            most.look()
            await asyncio.sleep(0)
            return made

        monkeypatch.setattr(RunningShard, "arithmetic", watched)

    def look(self) -> None:
        self.looks += 1
        self.bytes = max(self.bytes, self.tensors.nbytes())


def model() -> nn.Module:
    made = nn.Linear(SIDE, SIDE // 2, bias=False)
    nn.init.constant_(made.weight, 0.01)
    return made


def loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (scores.mean(1) - wanted).square().mean()


def most(place: Path, replicas: int, optimizer: Optimizer, transport: str, mode: str) -> int:
    place.mkdir()
    data = TensorDataset(torch.ones(STEPS * 2, SIDE), torch.ones(STEPS * 2))
    script = Program(data, 1, 1, model, optimizer, loss=loss)
    options: dict[str, Any] = {"cluster__transport": transport, "training__chunk_bytes": CHUNK_BYTES, "mode": mode}
    with pytest.MonkeyPatch.context() as patch:
        watched = Most(patch)
        with Rig(place, 0, cluster__replicas=replicas, **options) as rig:
            rig.begin(script)
            rig.finish()
    assert watched.looks
    return watched.bytes


@pytest.mark.parametrize(
    ("optimizer", "transport", "mode", "weights"),
    [
        pytest.param(torch.optim.AdamW, "shm", "sync", 3, marks=pytest.mark.long),
        pytest.param(plain, "shm", "sync", 3, marks=pytest.mark.long),
        # Workers that are behind read a slot more or less than without replicas.
        pytest.param(plain, "shm", "async", 4, marks=pytest.mark.long),
        pytest.param(torch.optim.AdamW, "grpc", "sync", 4, marks=pytest.mark.long),
    ],
)
def test_a_copy(optimizer: Optimizer, transport: str, mode: str, weights: int, tmp_path: Path) -> None:
    """So many times the weights, and the optimizer state once."""
    without, with_ = (most(tmp_path / str(n), n, optimizer, transport, mode) for n in (0, 1))
    assert with_ - without <= (weights + STATE[optimizer]) * WEIGHTS + SLACK
    assert with_ - without >= (1 + STATE[optimizer]) * WEIGHTS, "a copy is a copy"


def test_a_backup_makes_its_versions_in_the_memory_of_those_that_it_has_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not in memory that the version before still has, as that of a chunk that has not changed."""
    asked = list[bool]()

    def noted(spare: Mapping[int, torch.Tensor], base: Version) -> Callable[[Chunk], torch.Tensor]:
        place = again(spare, base)

        def counted(chunk: Chunk) -> torch.Tensor:
            found = place(chunk)
            assert found is not base.tensors[chunk.index]
            asked.append(found is spare[chunk.index])
            return found

        return counted

    monkeypatch.setattr(making, "again", noted)
    most(tmp_path / "run", 1, plain, "shm", "sync")
    assert asked
    assert all(asked)


def test_memory_that_is_still_in_use_is_not_written() -> None:
    chunk = make_plan(make_layout([TensorSpec("w", (8,), "float32")], 4096), 1).chunks_of(0)[0]
    mine, other = torch.zeros(chunk.elements), torch.ones(chunk.elements)
    base = Version(1, [chunk], {chunk.index: mine})
    assert again({chunk.index: other}, base)(chunk) is other
    assert again({chunk.index: mine}, base)(chunk) is not mine
    assert again({}, base)(chunk) is not mine
