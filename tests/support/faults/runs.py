"""Runs one case with real processes, and judges it: did the fault strike, is the result the twin's, is nothing left?"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paramserver.testing.arming import environment
from paramserver.testing.fired import Fired, FiredLog
from paramserver.testing.plan import Plan, Planned
from paramserver.testing.report import Report
from tests.support.faults import history
from tests.support.faults.cases import Case, Job
from tests.support.faults.history import Seen
from tests.support.faults.strikes import BROUGHT, Strikes
from tests.support.integration.harness import Done, Place, read_summary

SCRIPT = Path(__file__).parent / "scripts" / "small.py"
# What is only written down, to time recoveries.
_ACTS = (
    Planned("at", "coord.before_generation", "note", times=0),
    Planned("at", "coord.before_timeline", "note", times=0),
)
NOTES = (Planned("at", "commit.after_log_before_reply", "note", "server-*", times=0), *_ACTS)
# With replicas, workers write down each version. It is not the time of a successor that counts.
NOTES_OF_REPLICAS = (
    Planned("at", "coord.before_promotion", "note", times=0),
    Planned("at", BROUGHT, "note", "server-*", times=0),
    *_ACTS,
)


@dataclass(frozen=True, slots=True)
class Recovery:
    """After one kill, in seconds: until the coordinator acts, and until the next version. None: never."""

    who: str
    detection_s: float | None
    total_s: float | None

    @property
    def repair_s(self) -> float | None:
        """From detection to the next version; 0 if that came first, since others had done the work already."""
        if self.detection_s is None or self.total_s is None:
            return None
        return max(0.0, self.total_s - self.detection_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``verdict``: "ok", "did not fire", "differs", "failed"; ``detail``: why, in words."""

    name: str
    who: str
    place: str
    when: str
    verdict: str
    detail: str
    seconds: float
    planned: int
    struck: int
    duplicate: int
    recoveries: list[Recovery] = field(default_factory=list)
    rollbacks: int = 0
    steps_redone: int = 0
    plan: str = ""
    # What the run said, if it did not go well; not kept in the results.
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(replace(self, log=""))


def outcome_from_json(facts: dict[str, Any]) -> Outcome:
    """What `Outcome.as_json` gave."""
    recoveries = [Recovery(**recovery) for recovery in facts.pop("recoveries")]
    return Outcome(recoveries=recoveries, **facts)


class Bench:
    """Runs cases one after the other; runs without faults are made once per job."""

    def __init__(self, log: Path | None = None, checkpoints: bool = True, transport: str = "auto") -> None:
        """``log``: a directory for the output of runs that did not go well. Runs without faults choose a transport."""
        self._twins: dict[Job, tuple[dict[str, Any], list[Seen]]] = {}
        self._log = log
        self._checkpoints, self._transport = checkpoints, transport

    def twin(self, job: Job) -> tuple[dict[str, Any], list[Seen]]:
        """The summary of the job without faults, and what its workers saw."""
        job = replace(job, pace_s=0.0, transport="auto")  # which changes no bits
        if job not in self._twins:
            with Place() as place:
                done, summary = _run(place, job, {})
                done.check()
                assert summary is not None
                assert summary["contributions_applied"] == job.contributions, summary
                self._twins[job] = summary, _history(place)
        return self._twins[job]

    def run(self, case: Case) -> Outcome:
        """Run a case to its end, whatever that is."""
        checkpoints = self._checkpoints and case.job.checkpoints
        case = replace(case, job=replace(case.job, checkpoints=checkpoints, transport=self._transport))
        twin, quiet = self.twin(case.job)
        begun = time.time()
        with Place() as place:
            path = place.work / "plan.toml"
            notes = NOTES_OF_REPLICAS if case.job.replicas else NOTES
            path.write_text(Plan((*case.plan.faults, *notes), case.plan.seed).to_toml())
            try:
                with Strikes(case, path):
                    done, summary = _run(place, case.job, environment(path))
            except AssertionError as error:  # it hangs
                done, summary = Done(124, "", str(error), case.job.limit_s), None
            noted = FiredLog.beside(path).read()
            left = _residue(place) if done.code != 124 else ""
            seen = _history(place)
        faults = len(case.plan.faults)
        fired = [entry for entry in noted if entry.fault < faults]
        report = Report(case.plan, fired, begun, done.code, summary, twin)
        verdict, detail = _judge(report, summary, case, left)
        if verdict == "ok" and case.job.replicas:
            synchronous = case.job.mode == "sync"
            broken = history.problems(seen, quiet if synchronous else (), None if synchronous else case.job.epochs)
            verdict, detail = ("differs", "; ".join(broken)) if broken else (verdict, detail)
        log = "\n".join([case.plan.to_toml(), *report.lines(), done.text]) if verdict != "ok" else ""
        if log and self._log is not None:
            self._log.mkdir(parents=True, exist_ok=True)
            name = "".join(c if c.isalnum() or c in "-." else "_" for c in case.name)
            (self._log / f"{name}.txt").write_text(log)
        return Outcome(
            name=case.name,
            who=case.who,
            place=case.place,
            when=case.when,
            verdict=verdict,
            detail=detail,
            seconds=round(time.time() - begun, 2),
            planned=faults,
            struck=len(fired),
            duplicate=summary["contributions_duplicate"] if summary else 0,
            recoveries=recoveries(case, noted, seen),
            rollbacks=summary["rollbacks"] if summary else 0,
            steps_redone=summary["steps_redone"] if summary else 0,
            plan=case.plan.to_toml(),
            log=log,
        )


def _run(place: Place, job: Job, variables: dict[str, str]) -> tuple[Done, dict[str, Any] | None]:
    summary = place.work / "summary.json"
    words = job.words(str(SCRIPT), str(summary), str(place.work / "checkpoints"), str(place.work / "history"))
    done = place.launch(*words, environ=variables).wait(job.limit_s)
    return done, read_summary(summary) if summary.exists() else None


def _history(place: Place) -> list[Seen]:
    return history.read(place.work / "history")


def _residue(place: Place) -> str:
    """What a run has left behind: processes, temporary files."""
    try:
        place.wait_until_gone(time.monotonic())
    except AssertionError as error:
        return str(error)
    left = place.leftovers()
    return f"temporary files are left: {', '.join(left)}" if left else ""


def _judge(report: Report, summary: dict[str, Any] | None, case: Case, left: str) -> tuple[str, str]:
    job = case.job
    if report.code == 124:
        return "failed", "it hangs"
    if report.code or summary is None:
        return "failed", f"exit code {report.code}"
    if report.differing:
        return "differs", ", ".join(report.differing)
    if job.mode == "async" and summary["weights_sha256"] != (report.twin or {})["weights_sha256"]:
        return "differs", "the ledger of samples"
    if summary["contributions_applied"] != job.contributions:
        return "differs", f"{summary['contributions_applied']} contributions, not {job.contributions}"
    if case.stays and (summary["rollbacks"] or summary["steps_redone"]):
        return "differs", f"went back {summary['rollbacks']} times, {summary['steps_redone']} steps done again"
    if left:
        return "failed", left
    if report.unfired and not case.stays:
        return "did not fire", ", ".join(str(report.plan.faults[number]) for number in report.unfired)
    return "ok", ""


def recoveries(case: Case, noted: Sequence[Fired], seen: Sequence[Seen] = ()) -> list[Recovery]:
    """One for each kill of a server or worker of the plan, from what was noted after it and before the next kill.

    ``seen``: with replicas, what workers saw. Then a version counts when a worker has it.
    """
    faults = len(case.plan.faults)
    kills = [e for e in noted if e.fault < faults and e.do == "kill" and e.who.startswith(("server", "worker"))]
    found = []
    for number, kill in enumerate(kills):
        until = kills[number + 1].at if number + 1 < len(kills) else float("inf")
        after = [e for e in noted if e.fault >= faults and kill.at < e.at < until]
        acted = next((e.at for e in after if e.what.startswith("coord.")), None)
        commits = [e for e in after if e.what.startswith("commit.")]
        if case.job.replicas:
            # A version that comes before the coordinator acts was published before the kill.
            published = history.next_version(seen, kill.at if acted is None else acted)
            published = None if published is None or published >= until else published
        elif kill.who.startswith("server"):  # its successor has to publish something
            published = next((e.at for e in commits if e.who == kill.who and e.pid != kill.pid), None)
        else:  # the step at which it was lost, on all servers
            first = {e.who: e.at for e in reversed(commits) if e.step >= kill.step}
            published = max(first.values()) if len(first) > 1 else None
        found.append(Recovery(kill.who, _since(kill.at, acted), _since(kill.at, published)))
    return found


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 3)


def load(path: Path) -> dict[str, Outcome]:
    """The results so far, by the name of the case."""
    if not path.exists():
        return {}
    return {facts["name"]: outcome_from_json(facts) for facts in json.loads(path.read_text())}


def save(path: Path, outcomes: dict[str, Outcome]) -> None:
    """Write the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps([outcome.as_json() for outcome in outcomes.values()], indent=1) + "\n")
    temporary.replace(path)
