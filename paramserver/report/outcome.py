"""How a run ended, in one sentence. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.report.data import Kind, Outcome
from paramserver.report.text import count, seconds

# Exit codes of shells after a signal begin here.
_SIGNALS = 128


def finished(summary: Mapping[str, Any], exit_code: int | None = None) -> Outcome:
    """Of a run whose result was gathered."""
    broken = len(summary["broken_promises"])
    mode = "synchronous" if summary["mode"] == "sync" else "asynchronous"
    made = f"{count(summary['steps'], 'step')} in {mode} mode within {seconds(summary['seconds'])}"
    if broken:
        kind: Kind = "failed"
        kept = f"{count(broken, 'promise is', 'promises are')} broken"
    else:
        kind = "stopped" if summary["state"] == "stopped" else "done"
        kept = "everything promised is there"
    early = ", ended early," if summary["state"] == "stopped" else ""
    return Outcome(kind=kind, sentence=f"It made {made}{early} and {kept}.", exit_code=exit_code)


def running(status: Mapping[str, Any]) -> Outcome:
    """Of a job that runs, or that has ended while its coordinator still answers."""
    ends: dict[str, Kind] = {"done": "done", "failed": "failed", "stopped": "stopped"}
    return Outcome(kind=ends.get(status["state"], "running"), sentence=status["sentence"])


def without_training(broken: Sequence[str] = ()) -> Outcome:
    """Of a script that never asked for a cluster. ``broken``: promises, each in a sentence."""
    if broken:
        return Outcome(kind="failed", sentence=f"The script ended without training: {'; '.join(broken)}.", exit_code=1)
    return Outcome(kind="done", sentence="The script ended without training.", exit_code=0)


def broken_off(exit_code: int, why: str) -> Outcome:
    """Of a run without a result. ``why``: the error or the last line of the launcher; may be empty."""
    if exit_code > _SIGNALS and not why:
        name = signal.Signals(exit_code - _SIGNALS).name if exit_code - _SIGNALS in list(signal.Signals) else "a signal"
        return Outcome(kind="interrupted", sentence=f"The run was interrupted by {name}.", exit_code=exit_code)
    why = why.rstrip(".").removesuffix("; the run ends")
    reason = f": {why}" if why else ""
    return Outcome(kind="failed", sentence=f"The run ended with exit code {exit_code}{reason}.", exit_code=exit_code)
