"""How a run ends: whether every promise is kept, in lines for people and as an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint.names import parse_name
from paramserver.checkpoint.place import Place
from paramserver.config import Run
from paramserver.core.job.status import took_over
from paramserver.core.records.digits import value_text
from paramserver.v1 import coordinator_pb2, types_pb2

# Exit code of a run that has broken a promise.
BROKEN = 1
# The closing line has so many of the values that the script logged last; the summary has all.
_VALUES = 8


def look_at_checkpoint(directory: str, name: str, version: int) -> str:
    """The reason why ``name`` is no whole checkpoint of ``version`` in ``directory``; "" if it is. Reads no tensors."""
    if (parse_name(name) or (-1,))[0] != version:
        return f"version {version}, the last one, is not saved in {directory}: the last checkpoint is {name or 'none'}"
    try:
        found = next((each for each in catalog.survey(Place(directory)) if each.name == name), None)
    except (errors.CheckpointError, OSError) as error:
        return f"the last checkpoint {name} cannot be read in {directory}: {error}"
    if found is None:
        return f"the last checkpoint {name} is not in {directory} any more: somebody has removed it"
    if found.manifest is None or found.problem:
        return f"the last checkpoint {name} in {directory} is not whole: {found.problem}"
    return ""


def mode_text(status: coordinator_pb2.StatusResponse) -> str:
    """The mode in words: "sync", "async, staleness 4", "async, unbounded"."""
    consistency = status.view.consistency
    if consistency.mode == types_pb2.MODE_SYNC:
        return "sync"
    return f"async, staleness {consistency.staleness}" if consistency.HasField("staleness") else "async, unbounded"


def broken_sentences(broken: Mapping[str, str]) -> list[str]:
    """The broken promises of a job, in a fixed order."""
    return [broken[key] for key in sorted(broken)]


def exit_code(summary: Mapping[str, Any]) -> int:
    """The exit code of a run that has ended by itself: 0 if every promise is kept."""
    return BROKEN if summary["broken_promises"] else 0


def broken_untrained(run: Run) -> list[str]:
    """The broken promises of a job that has ended without training: files that there is nothing to write to."""
    wanted = {"run.save": run.save, "run.summary": run.summary}
    return [
        f"nothing was trained, so {path}, which {setting} names, was not written"
        for setting, path in wanted.items()
        if path
    ]


def closing_lines(status: coordinator_pb2.StatusResponse, summary: Mapping[str, Any]) -> list[str]:
    """The last lines of a run. The very last says that every promise is kept, or there is a line per broken promise."""
    values = [f"{name} {value_text(value)}" for name, value in sorted(summary["metrics"].items())]
    more = [f"and {len(values) - _VALUES} more values"] if len(values) > _VALUES else []
    metrics = ", ".join(values[:_VALUES] + more)
    broken: list[str] = summary["broken_promises"]
    how, steps = "ended" if broken else "done", f"{summary['steps']} steps"
    if summary["state"] == "stopped":
        how = "stopped"
        if summary["epochs_planned"]:
            steps += f", {summary['epochs']} of {summary['epochs_planned']} epochs"
    return [
        f"{how}: {mode_text(status)}, {steps} in {summary['seconds']:.1f} s, "
        f"{summary['samples_per_s']:.0f} samples/s" + (f", {metrics}" if metrics else ""),
        f"weights sha256 {summary['weights_sha256']}",
        *(broken_lines(broken) or [_all_there(status, summary)]),
    ]


def broken_lines(broken: Iterable[str]) -> list[str]:
    """A line for people for each broken promise."""
    return [f"promise broken: {sentence}" for sentence in broken]


_REASONS = {
    "duplicate": "{} brought twice",
    "incomplete": "{} of a step that was not completed",
    "late": "{} later than a change of mode",
    "refused": "{} refused",
    "unanswered": "{} of workers that were lost",
    "unsent": "{} of workers that left in the middle of a step",
}


def _all_there(status: coordinator_pb2.StatusResponse, summary: Mapping[str, Any]) -> str:
    by_data = status.data.slice_size > 0
    counted = f"{summary['samples']} samples" if by_data else f"{summary['contributions_applied']} contributions"
    missed: Mapping[str, int] = summary["contributions_not_counted"]
    why = ", ".join(_REASONS[reason].format(number) for reason, number in missed.items())
    facts = [
        f"{summary['steps']} steps",
        f"{counted} counted once",
        f"{sum(missed.values())} contributions not counted" + (f" ({why})" if why else ""),
    ]
    if summary["takeovers"]:
        facts.append(took_over(summary["takeovers"], summary["repairs"]))
    if summary["steps_skipped"]:
        facts.append(f"{summary['steps_skipped']} steps skipped since a gradient was not finite")
    if poisoned := summary["poisoned_slices"]:
        facts.append(f"without samples that kill the workers that compute them: {'; '.join(poisoned)}")
    if compared := summary.get("audit", {}).get("compared"):
        facts.append(f"{compared} slices computed by two workers came out the same")
    if summary["checkpoint"]:
        facts.append(f"last checkpoint {summary['checkpoint']}")
    return f"everything promised is there: {', '.join(facts)}"
