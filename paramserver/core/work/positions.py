"""Slice positions that belong to one worker, because it keeps a residual of its contribution for the next step.

A worker has the same positions in every step, and keeps nothing for a step without the position.
"""

from __future__ import annotations

from paramserver.core.work.slices import Range, SyncSchedule, assign


def fixed_share(of: int, slices_per_step: int, rank: int, workers: int) -> Range:
    """The positions of a step of ``of`` slices (at most ``slices_per_step``) that belong to a worker, in every step."""
    lo, hi = assign(slices_per_step, workers)[rank]
    return min(lo, of), min(hi, of)


def flushes(schedule: SyncSchedule, version: int, position: int, every: int) -> bool:
    """True if a contribution to the step after ``version`` must include all residuals.

    This holds if the step makes a version that is a multiple of ``every`` (checkpoints are taken there), at the end of
    an epoch, and if the next step is too short to have the position.
    """
    if (version + 1) % every == 0:
        return True
    step, following = schedule.step(version), schedule.step(version + 1)
    return following.epoch != step.epoch or position >= len(following.slices)
