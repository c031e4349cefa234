"""Workers of all kinds while the job goes back: clients, late ones, dying ones, some between epochs, with loaders."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.membership.joining import JoinOptions
from paramserver.transport.rotating import coordinator_channel
from paramserver.v1 import types_pb2
from paramserver.worker.client import RawClient
from paramserver.worker.context import Context
from paramserver.worker.engine import Engine
from tests.support.cluster.faults import FaultPlan
from tests.support.cluster.harness import JOB_S, until, wait
from tests.support.cluster.programs import Program, adamw, cosine, dataset, network
from tests.support.cluster.small_job import BATCH, SAMPLES, SLICES, program
from tests.support.failover.rollback import Rig, Strike, same, twin
from tests.support.failover.takeover import JOB


def client(rig: Rig) -> RawClient:
    """What `ps.Client` gives."""
    connect = rig.network.connect_from(FaultPlan())
    options = JoinOptions(role=types_pb2.ROLE_WORKER, job=JOB, index=0, pid=os.getpid(), join_timeout_s=JOB_S)
    engine = Engine(rig.background, connect, coordinator_channel(rig.places, connect), options, JOB_S)
    engine.join()
    return RawClient(engine, engine.close)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_client_is_told_to_push_again(mode: str, tmp_path: Path) -> None:
    """Nobody else knows what it pushed."""
    with Rig(tmp_path, 2, mode=mode, workers=1, slices_per_step=1, training__chunk_bytes=64) as rig:
        rig.begin()
        with client(rig) as one:
            one.init({"sum": np.zeros(40, np.float32)})
            pushed = 0
            for _ in range(5):
                one.push({"sum": np.ones(40, np.float32)})
                pushed += 1
            until("a checkpoint", lambda: rig.record().checkpoint not in ("", "step-00000000-t0"))
            rig.kill_now("server-1")
            with pytest.raises(errors.RolledBackError, match=r"went back to version \d+: push again what was pushed"):
                one.push({"sum": np.ones(40, np.float32)})
            back = one.version
            assert 2 <= back <= 5
            while pushed < 8:
                one.push({"sum": np.ones(40, np.float32)})
                pushed += 1
            # Five before, of which some were lost, and three after.
            assert one.pull()["sum"].tolist() == [back + 3.0] * 40
        assert rig.rollbacks == 1


def test_one_dies_and_one_comes_meanwhile(tmp_path: Path) -> None:
    def change() -> None:
        rig.hands[1].out.cut()
        rig.work(program())

    strikes = [Strike("apply.mid", "server-1", 5), Strike("restore.before_load", "server-0", do=change)]
    with Rig(tmp_path, 3, strikes, lease_s=1.0) as rig:
        rig.begin(program())
        wait(strikes[1].done, "the roll-back")
        until("the newcomer is there", lambda: len(rig.hands) == 3)
        summary = rig.finish([rig.hands[0], rig.hands[2]])
        context = rig.hands[1].context
        assert context is not None
        rig.run(context.engine.member.session._fail(errors.EndedError("the test is over")))
    same(summary, twin("faults", program(), slices_per_step=SLICES))


class Watched(Program):
    """Notes the epochs, and does something after each."""

    def __init__(self, after: Any, **options: Any) -> None:
        super().__init__(
            dataset(SAMPLES), BATCH, 3, model=lambda: network(norm=True), optimizer=adamw, schedule=cosine, **options
        )
        self.after = after
        self.epochs_seen: list[tuple[int, int]] = []
        self.processes = 0

    def __call__(self, ctx: Context) -> None:
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        loader = ctx.prepare(
            DataLoader(self.data, batch_size=self.batch_size, shuffle=True, num_workers=self.processes)
        )
        assert self.schedule is not None
        scheduler = self.schedule(optimizer, self.epochs * len(loader))
        model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
        for epoch in ctx.epochs(self.epochs):
            self.epochs_seen.append((ctx.rank, epoch))
            for x, y in loader:
                self.loss(model(x), y).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            self.after(ctx, epoch)


def test_a_script_between_its_epochs(tmp_path: Path) -> None:
    """Earlier epochs come again."""
    killed = threading.Event()

    def saved(version: int) -> bool:
        return rig.record().checkpoint.startswith(f"step-{version:08}")

    def after(ctx: Context, epoch: int) -> None:
        # No worker goes on while a checkpoint is written: the next one would be left out.
        if killed.is_set():
            return
        if epoch == 0:
            until("a checkpoint of epoch 0", lambda: saved(3) or saved(6))
        elif ctx.rank:
            until("the server is killed", killed.is_set)
        else:
            until("a checkpoint of epoch 1", lambda: saved(6))
            rig.kill_now("server-0")
            killed.set()
            until("the job went back", lambda: rig.rollbacks == 1)

    script = Watched(after)
    with Rig(tmp_path, 3) as rig:
        rig.begin(script)
        summary = rig.finish()
    seen = [epoch for rank, epoch in script.epochs_seen if rank == 0]
    assert seen == [0, 1, 1, 2], seen
    same(summary, twin("watched", Watched(lambda *_: None), slices_per_step=SLICES))


def test_loaders_with_processes(tmp_path: Path) -> None:
    """They have fetched ahead what is not wanted any more."""
    script = Watched(lambda *_: None)
    script.processes = 2
    with Rig(tmp_path, 3, [Strike("apply.mid", "server-1", 5)], workers=1) as rig:
        rig.begin(script)
        summary = rig.finish()
        assert rig.rollbacks == 1
    same(summary, twin("watched", Watched(lambda *_: None), slices_per_step=SLICES))
