"""Choices of a coordinator that starts about an earlier coordinator of its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Choices about an earlier coordinator of this job.

    ``resume``: take its job over if the job has not ended; ``must``: and begin no new job. ``fresh``: forget the job.
    With neither ``resume`` nor ``fresh``, refuse to start. ``standby``: if another coordinator leads, wait to take its
    place. ``gather``: gather the result at the end; otherwise the launcher does. ``token``: the name under which to
    lead, "" for any. ``former``: the name of a coordinator that is known to have ended. ``histories``: of the job's
    checkpoints, if the launcher keeps their place; ``private``: that place is the launcher's own.
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
