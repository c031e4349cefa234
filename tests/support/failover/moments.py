"""The moments of a step at which servers die, and a schedule that advances once per epoch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paramserver.worker.context import Context
from tests.support.cluster.programs import Program
from tests.support.failover.rollback import Strike

# 8 steps of 4 slices, the last one of an epoch of 2; a checkpoint of versions 0, 3, 6 and 8.
EVERY, LAST = 3, 7
MOMENTS: dict[str, list[Strike]] = {
    "staged (C01)": [Strike("push.after_stage", "server-1", 5)],
    "before it decides": [Strike("step.before_decide", "server-0", 5)],
    "decided": [Strike("step.after_decide", "server-1", 5)],
    "half applied (C05)": [Strike("apply.mid", "server-1", 5)],
    "weights without state (C06)": [Strike("apply.after_weights_before_opt", "server-0", 5)],
    "before it publishes": [Strike("commit.before_log", "server-1", 5)],
    "published, not answered (A07)": [Strike("commit.after_log_before_reply", "server-0", 5)],
    "first step": [Strike("push.recv", "server-1", 0)],
    "last step": [Strike("commit.before_log", "server-1", LAST)],
    "last version": [Strike("commit.after_log_before_reply", "server-1", LAST)],
    "both at once (C03)": [Strike("apply.mid", "server-0", 5, also=("server-1",))],
    "one, then the other": [Strike("apply.mid", "server-0", 5), Strike("apply.mid", "server-1", 6)],
    "three times": [Strike("commit.before_log", "server-1", 5, times=3)],
    "while it restores (E23)": [Strike("apply.mid", "server-1", 5), Strike("restore.before_load", "server-1", times=3)],
    "the other while it restores": [Strike("apply.mid", "server-1", 5), Strike("restore.after_load", "server-0")],
    "version 0 is written": [Strike("ckpt.mid_write", "server-1", 0)],
    "version 0 is written, both": [Strike("ckpt.before_rename", "server-0", 0, also=("server-1",))],
    "a checkpoint is written": [Strike("ckpt.mid_write", "server-0", 6)],
    "its part is written": [Strike("ckpt.shard_done", "server-1", 6)],
    "the last checkpoint is written": [Strike("ckpt.before_fsync", "server-1", LAST + 1)],
}


def fresh(strikes: list[Strike]) -> list[Strike]:
    """Strikes count, so each test has its own."""
    return [replace(strike, done=type(strike.done)()) for strike in strikes]


def halving(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Per epoch."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class PerEpoch(Program):
    """Advances its schedule after each epoch, outside of the loop."""

    def __call__(self, ctx: Context) -> None:
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        loader = ctx.prepare(DataLoader(self.data, batch_size=self.batch_size, shuffle=True))
        scheduler = halving(optimizer, 0)
        model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
        slices = 0
        for _ in ctx.epochs(self.epochs):
            for x, y in loader:
                self.loss(model(x), y).backward()
                if self.each is not None:
                    self.each(ctx, slices)
                optimizer.step()
                optimizer.zero_grad()
                slices += 1
            scheduler.step()
