"""Servers die during synchronous training: all go back to a checkpoint, and not one bit of the result differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.programs import Program
from tests.cluster.rollback import Rig, Strike, same, twin
from tests.cluster.test_faults import SLICES, program

# 8 steps of 4 slices, the last one of an epoch of 2.
LAST = 7


MOMENTS: dict[str, list[Strike]] = {
    "staged": [Strike("push.after_stage", "server-1", 5)],
    "before it decides": [Strike("step.before_decide", "server-0", 5)],
    "decided": [Strike("step.after_decide", "server-1", 5)],
    "half applied": [Strike("apply.mid", "server-1", 5)],
    "weights without state": [Strike("apply.after_weights_before_opt", "server-0", 5)],
    "before it publishes": [Strike("commit.before_log", "server-1", 5)],
    "published, not answered": [Strike("commit.after_log_before_reply", "server-0", 5)],
    "first step": [Strike("push.recv", "server-1", 0)],
    "last step": [Strike("commit.before_log", "server-1", LAST)],
    "last version": [Strike("commit.after_log_before_reply", "server-1", LAST)],
    "both at once": [Strike("apply.mid", "server-0", 5, also=("server-1",))],
    "one, then the other": [Strike("apply.mid", "server-0", 5), Strike("apply.mid", "server-1", 6)],
    "three times": [Strike("commit.before_log", "server-1", 5, times=3)],
    "while it restores": [Strike("apply.mid", "server-1", 5), Strike("restore.before_load", "server-1", times=3)],
    "the other while it restores": [Strike("apply.mid", "server-1", 5), Strike("restore.after_load", "server-0")],
}


@pytest.mark.parametrize("when", MOMENTS)
def test_a_server_dies(when: str, tmp_path: Path) -> None:
    strikes = [Strike(s.at, s.who, s.step, s.nth, s.times, s.do, s.also) for s in MOMENTS[when]]
    with Rig(tmp_path, 3, strikes) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert rig.rollbacks >= 1
        assert len(rig.deaths) == sum(strike.times * (1 + len(strike.also)) for strike in strikes)
    same(summary, twin("faults", program(), slices_per_step=SLICES))
