"""The file of records: JSON lines, one for each step that was closed. It is readable while the job runs.

The first line of each part names the job: ``{"paramserver": "records 1", "job": ..., "beginning": ...}``. The
others are like ``{"step": 12, "epoch": 0, "timeline": 0, "time": 1790000000.5, "values": {"loss": 0.3}}``.

The last value of a name and step counts. Where the job goes back, its steps come again with a higher timeline: the
first of them voids all lines before it with the same step or a later one, and so does the first step of a part.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from paramserver import errors
from paramserver.core.records.steps import StepValues

FORMAT = "records 1"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RecordsFile:
    """``beginning``: the same for all coordinators of a job. ``resumed``: the job goes on from a checkpoint."""

    def __init__(self, path: Path, job: str, beginning: int, resumed: bool) -> None:
        self.name = f"the file {path}"
        self._path, self._job, self._beginning, self._resumed = path, job, f"{beginning:x}", resumed
        self._file: TextIO | None = None

    def earlier(self) -> tuple[list[StepValues], bool]:
        """The steps in the file if the job goes on with it, and whether this very job has written the last of them."""
        goes_on, ours = self._found()
        return (read(self._path), ours) if goes_on else ([], False)

    def open(self) -> None:
        """Go on with the file of this job, or begin one; a file of another job is set aside as FILE.old-N."""
        goes_on, ours = self._found()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if goes_on is False:
            numbers = (number for number in range(1, 1 << 20))
            aside = (self._path.with_name(f"{self._path.name}.old-{number}") for number in numbers)
            self._path.rename(next(path for path in aside if not path.exists()))
        self._file = self._path.open("a+", encoding="utf-8")
        _cut(self._file)
        if not ours:
            self._write({"paramserver": FORMAT, "job": self._job, "beginning": self._beginning})

    def _found(self) -> tuple[bool | None, bool]:
        """Whether the job goes on with the file (None: there is none), and whether this job wrote its last part."""
        heads = [head for head, _ in _parts(self._path)]
        ours = bool(heads) and heads[-1].get("beginning") == self._beginning
        return (ours or self._resumed) if heads else None, ours

    def log(self, step: StepValues, at: float) -> None:
        """Write a step, which was closed at the time ``at``."""
        values = {name: value if math.isfinite(value) else _spelled(value) for name, value in step.values.items()}
        epoch = {} if step.epoch is None else {"epoch": step.epoch}
        line = {"step": step.step, **epoch, "timeline": step.timeline, "time": round(at, 3), "values": values}
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        if not os.fstat(self._file.fileno()).st_nlink:
            self.close()
            raise FileNotFoundError(errno.ENOENT, "it was deleted while the job wrote to it")
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def check(path: Path) -> None:
    """Raises UserError if something else lies there."""
    if path.exists() and path.stat().st_size and next(_parts(path), None) is None:
        raise errors.UserError(f"run.records is {path}, which exists and is no file of records: name another file")


def read(path: Path) -> list[StepValues]:
    """The values that count, by step. Timelines are counted from 1 and rise from part to part."""
    steps: dict[int, StepValues] = {}
    newest, number = (-1, -1), 0
    for part, (_, lines) in enumerate(_parts(path)):
        for line in lines:
            step, order = int(line["step"]), (part, int(line["timeline"]))
            if order > newest:
                newest, number = order, number + 1
                steps = {known: old for known, old in steps.items() if known < step}
            values = {name: _NON_FINITE.get(value, value) for name, value in line["values"].items()}
            before = steps[step].values if step in steps else {}
            steps[step] = StepValues(step, order[1], {**before, **values}, line.get("epoch"))
    return [steps[step] for step in sorted(steps)]


def _parts(path: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The parts of a file: their first lines, and the other lines; none of a file that is no file of records."""
    head: dict[str, Any] | None = None
    lines: list[dict[str, Any]] = []
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # a coordinator that was killed has left half a line
            line = None
        if isinstance(line, dict) and line.get("paramserver") == FORMAT:
            if head is not None:
                yield head, lines
            head, lines = line, []
        elif head is None:
            return
        elif isinstance(line, dict) and {"step", "timeline", "values"} <= line.keys():
            lines.append(line)
    if head is not None:
        yield head, lines


def _cut(file: TextIO) -> None:
    """Remove half a line at the end."""
    file.seek(0)
    content = file.read()
    if content and not content.endswith("\n"):
        file.truncate(len(content[: content.rfind("\n") + 1].encode()))
    file.seek(0, 2)


def _spelled(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
