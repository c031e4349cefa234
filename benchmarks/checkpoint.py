"""The wait of training for a checkpoint of 100 million parameters with Adam, beside the time of writing the checkpoint.

The worst case: updates back to back in one process, without a network or gradients to compute between them, so that the
step after the copy begins at once. The pause is the time that updates wait for the copy of the optimizer state. The
step times with and without a checkpoint being written show the cost of sharing the cores.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.rows import Row, rows
from paramserver.checkpoint.place import Place
from paramserver.core.layout.optimizers import Optimizers
from paramserver.core.layout.plan import Plan, TensorSpec, make_layout, make_plan
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.names import SyncName
from paramserver.server.saving.saver import Saver
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.version import Version
from paramserver.tensors.optimizers import describe
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2

LAYERS, WIDTH = 24, 2048
BEFORE, AFTER = 6, 60


@dataclass(slots=True)
class Times:
    """Seconds. ``alone``, ``beside``: of each step without and with a checkpoint being written."""

    pause: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


def run(repetitions: int) -> list[Row]:
    """One checkpoint per repetition. Raises RuntimeError if a checkpoint cannot be written."""
    torch.set_num_threads(1)
    times = Times()
    asyncio.run(_run(repetitions, times))
    case = f"{LAYERS * WIDTH * WIDTH / 1e6:.0f} M parameters, Adam"
    share = median(pause / write for pause, write in zip(times.pause, times.write, strict=True))
    print(f"the pause is {share:.1%} of the writing", file=sys.stderr)
    return [
        *rows("checkpoint", case, {"pause": times.pause, "write": times.write}, "pause"),
        *rows("checkpoint", f"{case}, a step", {"alone": times.alone, "while writing": times.beside}, "alone"),
    ]


async def _run(repetitions: int, times: Times) -> None:
    layout = make_layout([TensorSpec(f"layer{i}", (WIDTH, WIDTH), "float32") for i in range(LAYERS)])
    plan = make_plan(layout, 1)
    name, groups = describe(torch.optim.Adam([torch.zeros(1)], lr=1e-4))
    chunks = plan.chunks_of(0)
    tensors = ShardTensors(layout, chunks, Optimizers((name,)))
    version = Version(0, chunks, {chunk.index: torch.randn(chunk.elements) for chunk in chunks})
    gradient = {chunk.index: torch.randn(chunk.elements) for chunk in chunks}
    used = frozenset(range(LAYERS))

    def contribution(step: int) -> list[Contribution]:
        return [Contribution(SyncName(step, 0, 1, 1), 1, 8, False, step, used, (groups[0],), gradient)]

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(repetitions):
            with tempfile.TemporaryDirectory() as directory:
                saver = _saver(plan, Path(directory))
                taken = False
                for step in range(BEFORE + AFTER):
                    began = time.monotonic()
                    version = await loop.run_in_executor(
                        pool, tensors.build, version, contribution(version.number), None
                    )
                    writing = taken and not _written(saver)
                    (times.beside if writing else times.alone).append(time.monotonic() - began)
                    if step == BEFORE:
                        waited, taken = tensors.copy_s, True
                        saver.take(version, tensors, ShardState(Consistency(Mode.SYNC)), {})
                    if taken and _written(saver):
                        break
                while not _written(saver):
                    await asyncio.sleep(0.01)
                times.pause.append(tensors.copy_s - waited)
                times.write.append(saver.write_s)
                await saver.close()


def _saver(plan: Plan, directory: Path) -> Saver:
    config = shard_pb2.ConfigureRequest(job="benchmark", shards=1)
    return Saver(Place(str(directory)), plan, config, _nobody)


def _nobody(address: str) -> Channel:
    raise AssertionError("one server needs no other")


def _written(saver: Saver) -> bool:
    (status,) = saver.statuses()
    if status.state == shard_pb2.COPY_STATE_FAILED:
        raise RuntimeError(f"the checkpoint could not be written: {status.reason}")
    return status.state == shard_pb2.COPY_STATE_SAVED
