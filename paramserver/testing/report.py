"""The outcome of a run under faults: which faults struck, and whether the result is that of a run without faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.testing.fired import Fired
from paramserver.testing.plan import Plan

Summary = Mapping[str, Any]
DIGESTS = ("weights_sha256", "optimizer_sha256", "buffers_sha256")


@dataclass(frozen=True, slots=True)
class Report:
    """``code``: the exit code of the run; ``begun``: its start, wall clock. ``summary`` and ``twin``: None: none."""

    plan: Plan
    fired: Sequence[Fired]
    begun: float
    code: int
    summary: Summary | None
    twin: Summary | None

    @property
    def unfired(self) -> list[int]:
        """The faults that never struck, by their place in the plan."""
        struck = {entry.fault for entry in self.fired}
        return [number for number in range(len(self.plan.faults)) if number not in struck]

    @property
    def differing(self) -> list[str]:
        """The digests that differ from the twin's; empty where asynchronous mode promises no equal bits."""
        if self.summary is None or self.twin is None or self.twin["mode"] != "sync":
            return []
        return [key for key in DIGESTS if self.summary[key] != self.twin[key]]

    @property
    def balance(self) -> int | None:
        """Contributions counted beyond those of the twin (below 0: lost contributions); None if it is not known."""
        if self.summary is None or self.twin is None:
            return None
        return int(self.summary["contributions_applied"]) - int(self.twin["contributions_applied"])

    def problems(self, allow_unfired: bool = False) -> list[str]:
        """Reasons why the run is no success, a sentence each."""
        found = []
        if self.code:
            found.append(f"the run ended with exit code {self.code}")
        elif self.summary is None:
            found.append("the run left no summary")
        if self.differing:
            found.append(f"{' and '.join(self.differing)} differ from the run without faults")
        if self.balance:
            found.append(f"{abs(self.balance)} contributions were {'lost' if self.balance < 0 else 'counted twice'}")
        if self.unfired and not allow_unfired:
            numbers = ", ".join(str(number + 1) for number in self.unfired)
            found.append(f"faults that never struck: {numbers}")
        return found

    def lines(self, allow_unfired: bool = False) -> list[str]:
        """The report for people."""
        rows = [("#", "planned", "struck", "after", "step", "pid")]
        for number, fault in enumerate(self.plan.faults):
            entries = [entry for entry in self.fired if entry.fault == number]
            if not entries:
                rows.append((str(number + 1), str(fault), "never", "", "", ""))
            for shown in entries[:3]:
                step = str(shown.step) if shown.step >= 0 else "-"
                rows.append(
                    (str(number + 1), str(fault), shown.who, f"{shown.at - self.begun:.2f} s", step, str(shown.pid))
                )
            if len(entries) > 3:
                rows.append(("", f"  and {len(entries) - 3} times more", "", "", "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return [*table, "", *self._result(), *self._verdict(allow_unfired)]

    def _result(self) -> list[str]:
        struck = len(self.plan.faults) - len(self.unfired)
        lines = [f"faults: {struck} of {len(self.plan.faults)} struck, {len(self.fired)} times in all"]
        if self.summary is None:
            return lines
        counted, again = self.summary["contributions_applied"], self.summary["contributions_duplicate"]
        text = f"contributions: {counted} counted, {again} came again and changed nothing"
        if self.balance is not None:
            text += f", {max(0, -self.balance)} lost, {max(0, self.balance)} counted twice"
        lines.append(text)
        seconds = f"time: {self.summary['seconds']:.1f} s of training"
        lines.append(seconds + (f", {self.twin['seconds']:.1f} s without faults" if self.twin else ""))
        if self.twin is None:
            lines.append("digests: not compared, there was no run without faults")
        elif self.twin["mode"] != "sync":
            lines.append("digests: not compared, since asynchronous mode promises no equal bits")
        else:
            equal = [key.removesuffix("_sha256") for key in DIGESTS if key not in self.differing]
            lines.append(f"digests: {', '.join(equal) or 'none'} equal to those of the run without faults")
        return lines

    def _verdict(self, allow_unfired: bool) -> list[str]:
        problems = self.problems(allow_unfired)
        return [f"FAILED: {problem}" for problem in problems] or ["ok"]

    def as_json(self, allow_unfired: bool = False) -> dict[str, Any]:
        """The report for programs."""
        return {
            "plan": self.plan.to_toml(),
            "faults": [
                {
                    "fault": str(fault),
                    "struck": [
                        {"who": e.who, "after_s": round(e.at - self.begun, 3), "step": e.step, "pid": e.pid}
                        for e in self.fired
                        if e.fault == number
                    ],
                }
                for number, fault in enumerate(self.plan.faults)
            ],
            "exit_code": self.code,
            "balance": self.balance,
            "differing": self.differing,
            "problems": self.problems(allow_unfired),
            "summary": self.summary,
            "twin": self.twin,
        }
