"""Servers die during synchronous training: all go back to a checkpoint, and not one bit of the result differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paramserver.worker.context import Context
from tests.support.cluster.harness import until, wait
from tests.support.cluster.programs import Aligned, Program, adamw, cosine, dataset, network, sgd
from tests.support.cluster.small_job import BATCH, EPOCHS, SAMPLES, SLICES, program
from tests.support.cluster.taps import Trap
from tests.support.failover.moments import EVERY, MOMENTS, PerEpoch, fresh
from tests.support.failover.rollback import Rig, Stop, Strike, same, twin
from tests.support.marks import long_but

# What they show is shown by their neighbours in MOMENTS, too; the crash matrix has every place.
SHORT = {
    "staged (C01)",
    "half applied (C05)",
    "published, not answered (A07)",
    "first step",
    "last version",
    "both at once (C03)",
    "while it restores (E23)",
    "version 0 is written",
    "a checkpoint is written",
}


@pytest.mark.parametrize("when", long_but(SHORT, MOMENTS))
def test_a_server_dies(when: str, tmp_path: Path) -> None:
    strikes = fresh(MOMENTS[when])
    with Rig(tmp_path, EVERY, strikes) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert rig.rollbacks >= 1
        assert len(rig.deaths) == sum(strike.times * (1 + len(strike.also)) for strike in strikes)
    same(summary, twin("faults", program(), slices_per_step=SLICES))
    assert summary["rollbacks"] == rig.rollbacks


class ServersDie(Trap):
    """Kills servers, not the coordinator, at something that this one does."""

    def __init__(self, what: str, nth: int, when: str, *names: str) -> None:
        super().__init__(what, nth, when)
        self.rig: Rig | None = None
        self._names = names

    async def _spring(self, kill: Callable[[], None]) -> None:
        self.fired.set()
        assert self.rig is not None
        for name in self._names:
            self.rig.strike(name)


COMMANDS = [
    ("call Shard.Configure", 1, "after"),
    ("call Shard.Activate", 0, "before"),
    ("call Shard.Activate", 1, "after"),
    ("answer Coordinator.InitializeDone", 0, "before"),
    ("answer Coordinator.InitializeDone", 0, "after"),
    ("call Shard.Release 0", 0, "before"),
    ("answer Coordinator.Finish", 0, "before"),
    ("answer Coordinator.Finish", 1, "before"),
]


DYING = {"one": ("server-1",), "both": ("server-0", "server-1")}
# At the other moments the death of both is that of one at a larger size; test_rollback_leaders.py has both, too.
BOTH_DIE = COMMANDS[0], COMMANDS[3], COMMANDS[6]


@pytest.mark.parametrize(
    ("what", "nth", "when", "who"),
    [
        *((*command, "one") for command in COMMANDS),
        *(
            pytest.param(*command, "both", marks=[] if command in BOTH_DIE else pytest.mark.long)
            for command in COMMANDS
        ),
    ],
)
def test_servers_die_when_it_does(what: str, nth: int, when: str, who: str, tmp_path: Path) -> None:
    """The coordinator: before there is a version 0, while it is published, at the end."""
    trap = ServersDie(what, nth, when, *DYING[who])
    with Rig(tmp_path, EVERY, trap=trap) as rig:
        trap.rig = rig
        rig.begin(program())
        summary = rig.finish()
        assert trap.fired.is_set(), trap.seen
        assert rig.rollbacks >= 1
        assert rig.deaths == list(DYING[who])
    same(summary, twin("faults", program(), slices_per_step=SLICES))


def test_what_a_roll_back_costs_is_counted(tmp_path: Path) -> None:
    """E02: the steps since the newest complete checkpoint, which is that of version 3, are counted as done again."""
    stop = Stop(4)
    with Rig(tmp_path, EVERY, [Strike("step.after_decide", "server-1", 5)]) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 4")
        # Training does not wait for the disk, so steps 4 and 5 may be through before the checkpoint is complete.
        until("the checkpoint of version 3 is complete", lambda: rig.record().checkpoint.startswith("step-00000003"))
        stop.released.set()
        summary = rig.finish()
    # Server-0 stood at version 5 or 6.
    assert summary["steps_redone"] in (2, 3)
    assert summary["rollbacks"] == 1


# ---- what has to be brought back with the weights


def clipped(ctx: Context, slices: int) -> None:
    ctx.clip_grad_norm(0.05)


class Spoilt(nn.Module):
    """A network whose loss is NaN for one sample, which is in one step of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(norm=True)

    def forward(self, x: Tensor) -> Any:
        """Scores of the classes."""
        scores = self.inner(x)
        marked = (x[:, 0] - MARKED).abs() < 1e-6
        return torch.where(marked[:, None], scores * math.nan, scores)


MARKED = float(dataset(SAMPLES).tensors[0][3, 0])


def make(**options: Any) -> Program:
    return Program(dataset(SAMPLES), BATCH, options.pop("epochs", EPOCHS), **options)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "momentum": lambda: make(optimizer=sgd),
    "adamw": lambda: make(optimizer=adamw),
    "buffers": lambda: make(model=lambda: network(norm=True), optimizer=sgd),
    "cosine (C15)": lambda: make(optimizer=sgd, schedule=cosine),
    "per epoch (C15)": lambda: PerEpoch(dataset(SAMPLES), BATCH, 3, optimizer=sgd),
    "clipped (C16)": lambda: make(optimizer=adamw, each=clipped),
    "skipped (NaN)": lambda: make(model=Spoilt, optimizer=adamw, epochs=3),
}
# Steps in which a server dies: 3 is the last one of an epoch, and the first one after a checkpoint.
WHEN = {
    "momentum": (4,),
    "adamw": (2,),
    "buffers": (4,),
    "cosine (C15)": (3, 4),
    "per epoch (C15)": (2, 3, 4, 5),
    "clipped (C16)": (3, 5),
    "skipped (NaN)": (2, 4),
}


# The first step of each with every `make test`.
@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(name, step, marks=[] if step == steps[0] else pytest.mark.long)
        for name, steps in WHEN.items()
        for step in steps
    ],
)
def test_what_comes_back(name: str, step: int, tmp_path: Path) -> None:
    strikes = [Strike("commit.before_log", "server-1", step)]
    if name.startswith("clipped"):  # between the norm and its use
        strikes = [Strike("apply.mid", "server-1", step)]
    with Rig(tmp_path, EVERY, strikes, workers=3) as rig:
        rig.begin(PROGRAMS[name]())
        summary = rig.finish()
    wanted = twin(name, PROGRAMS[name](), slices_per_step=SLICES)
    same(summary, wanted)
    assert summary["rollbacks"] == 1
    assert (wanted["steps_skipped"] > 0) == ("NaN" in name)


SHAPES: dict[str, dict[str, Any]] = {
    "a tensor over three shards (C12)": {"servers": 3, "training__chunk_bytes": 64},
    "more shards than chunks (C11)": {"servers": 5, "training__chunk_bytes": 1 << 20},
    "one shard": {"servers": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shards_of_other_shapes(shape: str, tmp_path: Path) -> None:
    options = dict(SHAPES[shape])
    last = options.get("servers", 2) - 1
    with Rig(tmp_path, EVERY, [Strike("commit.before_log", f"server-{last}", 4)], **options) as rig:
        rig.begin(make(model=Aligned, optimizer=adamw, schedule=cosine))
        summary = rig.finish()
    chunk_bytes = options.get("training__chunk_bytes")
    settings = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}
    same(
        summary,
        twin("aligned", make(model=Aligned, optimizer=adamw, schedule=cosine), slices_per_step=SLICES, **settings),
    )
    assert summary["rollbacks"] == 1
