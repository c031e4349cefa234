"""What a coordinator that starts is to do about an earlier one of its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What to do about an earlier coordinator of this job.

    ``resume``: take its job over if that has not ended; ``must``: and begin none. ``fresh``: forget it. Neither: refuse
    to start. ``standby``: if another one leads, wait to take its place. ``gather``: at the end, gather the result; else
    somebody else does. ``token``: under which name to lead, "" for any. ``former``: the name of a coordinator that is
    known to have ended. ``histories``: whose checkpoints are the job's, if the launcher keeps their
    place; ``private``: that place is its own.
    """

    resume: bool = False
    must: bool = False
    fresh: bool = False
    standby: bool = True
    gather: bool = True
    token: str = ""
    former: str = ""
    histories: tuple[str, ...] = ()
    private: bool = False
