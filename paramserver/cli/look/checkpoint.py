"""``paramserver checkpoint``: work on the files of checkpoints, and have a running job make one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from paramserver.checkpoint.catalog import Found
    from paramserver.checkpoint.manifest import Manifest
    from paramserver.checkpoint.place import Place
from paramserver.cli.common import tell
from paramserver.cli.examples import example
from paramserver.cli.target import NEAR, Where, find_target

app = App(name="checkpoint", help="Make, list, show, check and convert checkpoints.")

WAIT_S = 60.0

DAMAGED_EXIT_CODE = 5

Json = Annotated[bool, Parameter(name="--json")]


@app.command(help_epilogue=example("checkpoint now"))
def now(*, where: Where = NEAR) -> int:
    """Have a running job save its weights now, beside the checkpoints that it makes by itself.

    The command ends when the checkpoint is complete. Exit code 1 if that takes more than a minute.
    """
    from paramserver.v1.coordinator_pb2 import CheckpointRequest, CheckpointResponse

    response = find_target(where).call("Coordinator.Checkpoint", CheckpointRequest(wait_s=WAIT_S), WAIT_S + 10.0)
    assert isinstance(response, CheckpointResponse)
    tell(f"Wrote {response.name} to {response.place}.")
    if is_private(response.place):
        tell(
            "paramserver: warning: the run removes this directory when it ends: copy the checkpoint elsewhere to keep "
            "it, and give --checkpoint-dir to the next run",
            file=sys.stderr,
        )
    return 0


def is_private(place: str) -> bool:
    """Whether a run on this machine keeps checkpoints there among its own files, since it was given no directory."""
    from paramserver.machine.jobs import list_jobs

    return any(job.logs and Path(place).parent == Path(job.logs).parent for job in list_jobs())


@app.command(name="list", help_epilogue=example("checkpoint list"))
def list_(directory: str, /, *, json_: Json = False) -> int:
    """List the checkpoints in a directory, newest first, and what is wrong with those that cannot be loaded.

    Sizes are compared; "paramserver checkpoint verify" reads the contents, too.

    Parameters
    ----------
    directory
        A directory of checkpoints, or one checkpoint; a path or a URL.
    json_
        Print JSON instead.
    """
    place, _, found = _found(directory)
    if json_:
        tell(json.dumps([_facts(place, one) for one in found], indent=2))
    elif not found:
        tell(f"There are no checkpoints in {directory}.")
    else:
        tell("\n".join(_table(place, found)))
    return 0


@app.command(help_epilogue=example("checkpoint show"))
def show(directory: str, name: str = "", /, *, json_: Json = False) -> int:
    """Show one checkpoint: what it holds, where training stood, how it was made.

    Parameters
    ----------
    directory
        A directory of checkpoints, or one checkpoint; a path or a URL.
    name
        Which one, such as step-00000050-t1. Without it: the newest complete one.
    json_
        Print JSON instead: the manifest.
    """
    from dataclasses import asdict

    place, one, manifest = _one(directory, name)
    if json_:
        known = {"name": one.name, "problem": one.problem, "best": _best(place, one)}
        tell(json.dumps({**known, **asdict(manifest)}, indent=2))
    else:
        tell("\n".join(_description(place, one, manifest)))
    return 0


@app.command(help_epilogue=example("checkpoint verify"))
def verify(directory: str, name: str = "", /, *, json_: Json = False) -> int:
    """Read checkpoints, compare every byte with what was written, and see whether a job could go on from them.

    Exit code 5 if one of them is damaged, or if none is whole. An unfinished one counts if it is asked for by name.

    Parameters
    ----------
    directory
        A directory of checkpoints, or one checkpoint; a path or a URL.
    name
        Which one, such as step-00000050-t1. Without it: all of them.
    json_
        Print JSON instead: a list of name, state (whole, damaged, unfinished, unknown), reason.
    """
    place, named, found = _found(directory, name)
    rows = [(one.name, *_verified(place, one)) for one in found]
    if json_:
        tell(json.dumps([dict(zip(("name", "state", "reason"), row, strict=True)) for row in rows], indent=2))
    else:
        width = max((len(state) for _, state, _ in rows), default=0)
        for one, state, reason in rows:
            tell(f"{one}  {state.ljust(width)}  {reason}".rstrip())
        if not rows:
            tell(f"There are no checkpoints in {directory}.")
    states = {state for _, state, _ in rows}
    wrong = {"damaged", "unfinished", "unknown"} if named else {"damaged"}
    return DAMAGED_EXIT_CODE if states & wrong or "whole" not in states else 0


@app.command(help_epilogue=example("checkpoint export"))
def export(directory: str, /, *names: str, to: Literal["torch", "hf", "safetensors"]) -> int:
    """Convert a checkpoint for other programs. It is verified first.

    "paramserver checkpoint export DIRECTORY [NAME] --to FORMAT OUT"

    Parameters
    ----------
    directory
        A directory of checkpoints, or one checkpoint; a path or a URL.
    names
        Which one (without it: the newest good one), and OUT: the file or directory to write, which must not exist.
    to
        torch: a .pt file with "model" and "optimizer", for torch.load and load_state_dict. safetensors: one file, for
        load_state_dict. hf: a directory with weights and their index, as Hugging Face has them.
    """
    from paramserver.checkpoint import catalog
    from paramserver.checkpoint.export import export as write
    from paramserver.checkpoint.place import located
    from paramserver.errors import ConfigError
    from paramserver.logs import configure

    if not 1 <= len(names) <= 2:
        raise ConfigError("say what to write: paramserver checkpoint export DIRECTORY [NAME] --to FORMAT OUT")
    configure("warning")
    place, only = located(directory)
    name = names[0] if len(names) == 2 else only
    if name:
        _, _, chosen = _one(directory, name)
        catalog.verify(place, chosen)
    else:
        newest = catalog.newest(place)
        if newest is None:
            raise ConfigError(f"there is no good checkpoint in {directory}: see `paramserver checkpoint list`")
        chosen = newest
    with catalog.in_use(place, chosen.name):
        files = write(place, chosen, to, Path(names[-1]))
    size = sum(path.stat().st_size for path in files)
    tell(f"Wrote {chosen.name} to {names[-1]}: {len(files)} {'file' if len(files) == 1 else 'files'}, {_bytes(size)}.")
    return 0


# ---- finding


def _found(directory: str, name: str = "") -> tuple[Place, str, list[Found]]:
    """The place, the name that the user gave, and the checkpoints of that name (without one: all), newest first.

    Raises ConfigError for a name that is not there.
    """
    from paramserver.checkpoint.catalog import survey
    from paramserver.checkpoint.place import located
    from paramserver.errors import ConfigError

    place, only = located(directory)
    wanted = name or only
    found = [one for one in survey(place) if not wanted or one.name == wanted]
    if wanted and not found:
        raise ConfigError(f"there is no checkpoint {wanted!r} in {place}: see `paramserver checkpoint list`")
    return place, wanted, found


def _one(directory: str, name: str) -> tuple[Place, Found, Manifest]:
    """One checkpoint whose manifest can be read, and its place. Raises CheckpointError if the manifest cannot."""
    from paramserver.errors import CheckpointError, ConfigError

    place, _, found = _found(directory, name)
    for one in found:
        if one.manifest is not None and not one.problem:
            return place, one, one.manifest
    if not found:
        raise ConfigError(f"there are no checkpoints in {directory}")
    if len(found) == 1:
        raise CheckpointError(found[0].problem)
    raise ConfigError(f"there is no complete checkpoint in {directory}: see `paramserver checkpoint list`")


def _verified(place: Place, one: Found) -> tuple[str, str]:
    """The state of a checkpoint, and why."""
    from paramserver.errors import CheckpointError
    from paramserver.resume.checkpointing import verify as verify_all

    if one.incomplete:
        return "unfinished", one.problem
    if one.foreign:
        return "unknown", one.problem
    if one.manifest is None or one.problem:
        return "damaged", one.problem
    try:
        verify_all(place, one.manifest)
    except CheckpointError as error:
        return "damaged", str(error)
    return "whole", "" if one.manifest.finite else "but it has NaN or infinite weights"


# ---- printing


def _facts(place: Place, one: Found) -> dict[str, object]:
    state = _state(one)
    facts: dict[str, object] = {"name": one.name, "good": state == "good", "problem": "" if state == "good" else state}
    if one.manifest is not None:
        manifest = one.manifest
        facts |= {"job": manifest.job, "version": manifest.version, "timeline": manifest.timeline}
        facts |= {"epochs": epochs(place, manifest), "bytes": manifest.nbytes, "written": manifest.written}
        facts["best"] = _best(place, one)
    return facts


def _best(place: Place, one: Found) -> str:
    """The rank and the value of a checkpoint that is kept for a logged value; empty for another one."""
    from paramserver.checkpoint.best import read

    history = one.manifest.history if one.manifest is not None else None
    rows = enumerate(read(place), 1)
    number, found = next(((n, r) for n, r in rows if (r.name, r.history) == (one.name, history)), (0, None))
    if found is None:
        return ""
    return f"{'best' if number == 1 else f'best {number}'}: {found.metric} {found.value:.6g}"


def _state(one: Found) -> str:
    if one.incomplete:
        return "unfinished"
    if one.problem:
        return one.problem
    return "good" if one.manifest is not None and one.manifest.finite else "NaN or infinite weights"


def _table(place: Place, found: Sequence[Found]) -> list[str]:
    rows = [("name", "version", "epochs", "size", "age", "state")]
    for one in found:
        if one.manifest is None:
            rows.append((one.name, "", "", "", "", _state(one)))
            continue
        passed = epochs(place, one.manifest)
        shown = "" if passed is None else f"{passed:.2f}"
        facts = (str(one.manifest.version), shown, _bytes(one.manifest.nbytes), _age(one.manifest))
        rows.append((one.name, *facts, ", ".join(filter(None, (_state(one), _best(place, one))))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = (str.ljust, *[str.rjust] * 4, str.ljust)
    lines = ["  ".join(fit(cell, width) for fit, cell, width in zip(align, row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def _description(place: Place, one: Found, manifest: Manifest) -> list[str]:
    passed = epochs(place, manifest)
    tensors = manifest.model.get("tensors", [])
    facts = {
        "job": manifest.job,
        "version": f"{manifest.version} (timeline {manifest.timeline}, term {manifest.term})",
        "epochs": "unknown" if passed is None else f"{passed:.2f}",
        "kept as": _best(place, one),
        "written": f"{manifest.written} ({_age(manifest)} ago)",
        "model": f"{len(tensors)} tensors; layout {manifest.layout_digest[:16]}",
        "optimizer": _optimizer(manifest),
        "run": " ".join(f"{key}={value}" for key, value in sorted(manifest.run.items())),
        "made with": f"paramserver {manifest.paramserver}, torch {manifest.torch}",
        "servers": str(manifest.servers),
        "size": _bytes(manifest.nbytes),
    }
    lines = [f"{one.name}: {_state(one)}", *(f"  {key:<10} {value}" for key, value in facts.items() if value)]
    width = max(len(info.name) for info in manifest.files)
    return [*lines, *(f"  {info.name:<{width}}  {_bytes(info.bytes):>8}  {info.sha256}" for info in manifest.files)]


def _optimizer(manifest: Manifest) -> str:
    """The name of the optimizer; the names, if parameter groups have different ones."""
    found = manifest.model.get("optimizer", {})
    if not isinstance(found, dict):
        return "none"
    names = found.get("names")
    if isinstance(names, list) and names:
        return " and ".join(dict.fromkeys(map(str, names)))
    return str(found.get("name", "none"))


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _age(manifest: Manifest) -> str:
    from datetime import UTC, datetime

    seconds = max(0, int((datetime.now(UTC) - datetime.fromisoformat(manifest.written)).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def epochs(place: Place, manifest: Manifest) -> float | None:
    """How many epochs have been trained, the part of the present one included; None if the manifest does not tell."""
    from google.protobuf import json_format

    from paramserver.errors import ParamServerError
    from paramserver.v1 import coordinator_pb2, types_pb2
    from paramserver.wire.messages import data_from_proto, schedule_from_proto

    record = coordinator_pb2.JobRecord()
    try:
        json_format.ParseDict(manifest.position, record, ignore_unknown_fields=True)
        data = data_from_proto(record.data)
        slices = data.slices_per_epoch
        if not slices:
            return None
        if record.view.consistency.mode == types_pb2.MODE_ASYNC:
            return _epochs_counted(place, manifest, slices)
        epoch, rest = schedule_from_proto(record.view, data).position(manifest.version)
    except (
        json_format.ParseError,
        ParamServerError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ):
        return None  # the file may come from anywhere
    return epoch + 1 - sum(hi - lo for lo, hi in rest) / slices


def _epochs_counted(place: Place, manifest: Manifest, slices: int) -> float | None:
    """Epochs in asynchronous mode, where the servers have counted slices: {epoch: [[first, end], ...]}."""
    from paramserver.checkpoint.tensorfile import TensorFile

    with TensorFile(place, manifest.name, manifest.state[0]) as file:
        counted = json.loads(file.metadata["shard"])["counted"]
    done = sum(int(hi) - int(lo) for ranges in counted.values() for lo, hi in ranges)
    return min(int(epoch) for epoch in counted) + done / slices if counted else 0.0
