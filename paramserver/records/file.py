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
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from paramserver import errors
from paramserver.core.records.history import History
from paramserver.core.records.steps import REMEMBERED, StepValues

FORMAT = "records 1"
# Bytes that are read at once to find the last line.
_LOOK = 1 << 16
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier coordinators have written: the curves, and the last steps behind the first one of their timeline.

    ``ours``: this very job has written the last of them.
    """

    history: History
    steps: list[StepValues]
    ours: bool


class RecordsFile:
    """``beginning``: the same for all coordinators of a job. ``resumed``: the job goes on from a checkpoint."""

    def __init__(self, path: Path, job: str, beginning: int, resumed: bool) -> None:
        self.name = f"the file {path}"
        self._path, self._job, self._beginning, self._resumed = path, job, f"{beginning:x}", resumed
        self._file: TextIO | None = None

    def earlier(self) -> Earlier:
        """What is in the file, if the job goes on with it."""
        goes_on, ours = self._found()
        return _summed_up(self._path, ours) if goes_on else Earlier(History(), [], False)

    def open(self) -> None:
        """Go on with the file of this job, or begin one; a file of another job is set aside as FILE.old-N."""
        goes_on, ours = self._found()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if goes_on is False:
            numbers = (number for number in range(1, 1 << 20))
            aside = (self._path.with_name(f"{self._path.name}.old-{number}") for number in numbers)
            self._path.rename(next(path for path in aside if not path.exists()))
        _cut(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        if not ours:
            self._write({"paramserver": FORMAT, "job": self._job, "beginning": self._beginning})

    def _found(self) -> tuple[bool | None, bool]:
        """Whether the job goes on with the file (None: there is none), and whether this job wrote its last part."""
        heads = _heads(self._path)
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
    if path.exists() and path.stat().st_size and next(_lines(path), None) is None:
        raise errors.UserError(f"run.records is {path}, which exists and is no file of records: name another file")


def read(path: Path) -> list[StepValues]:
    """The values that count, by step. Timelines are counted from 1 and rise from part to part."""
    steps: dict[int, StepValues] = {}
    for begins, one in _steps(path):
        if begins:
            steps = {known: old for known, old in steps.items() if known < one.step}
        before = steps[one.step].values if one.step in steps else {}
        steps[one.step] = replace(one, values={**before, **one.values})
    return [steps[step] for step in sorted(steps)]


def _summed_up(path: Path, ours: bool) -> Earlier:
    """The same in bounded memory, however long the file is."""
    now, history = time.time(), History()
    last: deque[StepValues] = deque(maxlen=REMEMBERED)
    first: list[StepValues] = []
    for begins, one in _steps(path):
        if begins:
            history.void(one.step)
            last = deque((kept for kept in last if kept.step < one.step), maxlen=REMEMBERED)
            first = [one]
        last.append(one)
        history.add(one if ours else replace(one, timeline=0), now)
    return Earlier(history, [*first, *last], ours)


def _steps(path: Path) -> Iterator[tuple[bool, StepValues]]:
    """The steps of a file in order, and of each whether it voids all steps before it from its number on."""
    part, newest = 0, (-1, -1)
    for line, is_head in _lines(path):
        if is_head:
            part += 1
            continue
        order = part, int(line["timeline"])
        begins, newest = order > newest, max(order, newest)
        values = {name: _NON_FINITE.get(value, value) for name, value in line["values"].items()}
        yield begins, StepValues(int(line["step"]), order[1], values, line.get("epoch"))


def _heads(path: Path) -> list[dict[str, Any]]:
    """The first lines of all parts; none of a file that is no file of records."""
    if next(_lines(path), None) is None:
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return [json.loads(text) for text in file if text.startswith('{"paramserver"') and text.endswith("}\n")]


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    """The lines of a file, and whether each begins a part; none of a file that is no file of records."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with file:
        begun = False
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:  # a coordinator that was killed has left half a line
                line = None
            if isinstance(line, dict) and line.get("paramserver") == FORMAT:
                begun = True
                yield line, True
            elif not begun:
                return
            elif isinstance(line, dict) and {"step", "timeline", "values"} <= line.keys():
                yield line, False


def _cut(path: Path) -> None:
    """Remove half a line at the end."""
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _LOOK)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            end = begin + found + 1 if found >= 0 else begin
            if found >= 0:
                break
        file.truncate(end)


def _spelled(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
