"""A small synchronous training job, what it comes to without faults, and a worker of it that dies."""

from __future__ import annotations

from functools import cache
from typing import Any

from paramserver.worker.context import Context
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import Died, Outcome, train
from tests.support.cluster.programs import Program, adamw, cosine, dataset, network

# 14 slices, the last one of 3 samples: 4 steps an epoch, the last one of 2 slices.
SAMPLES, BATCH, SLICES, EPOCHS = 107, 8, 4, 2


def program(each: object = None) -> Program:
    return Program(
        dataset(SAMPLES),
        BATCH,
        EPOCHS,
        lambda: network(norm=True),
        adamw,
        cosine,
        each=each,  # type: ignore[arg-type]
    )


@cache
def twin() -> tuple[str, str, str]:
    """The same training without faults, in one worker."""
    return train(program(), slices_per_step=SLICES).digests


def calm(outcome: Outcome) -> None:
    """It came out as if nothing had happened."""
    assert outcome.summary["contributions_applied"] == 14 * EPOCHS
    assert outcome.digests == twin()


def calm_over(rules: list[Rule], seed: int, **options: Any) -> Outcome:
    """Train over a network that does all of this."""
    plan = FaultPlan(rules, seed=seed)
    outcome = train(program(), 3, 2, slices_per_step=SLICES, faults=plan, **options)
    plan.check()
    calm(outcome)
    return outcome


# For contributions and versions that travel in many small chunks.
BAD_STREAMS: dict[str, list[Rule]] = {
    "answers lost": [Rule("Shard.Pull", Fault.LOSE_REPLY, 0.3)],
    "sent twice": [Rule("Shard.P*", Fault.DUPLICATE, 0.3)],
    "uploads cut short": [Rule("Shard.Push", Fault.CUT_UPLOAD, 0.3)],
    "dropped and late": [
        Rule("Shard.P*", Fault.DROP_REQUEST, 0.1),
        Rule("Shard.P*", Fault.DELAY, 1.0, delay_s=0.005),
    ],
}


class Death:
    """Worker 1 dies before it hands in its slice number ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.died = False

    def __call__(self, ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == self.at:
            self.died = True
            raise Died
