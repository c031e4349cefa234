"""What came of a script."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Played:
    """How a script ended. ``weights``: of the job at its end, None if there was no job."""

    # The first error that a script ended with; None: it ended well.
    error: BaseException | None = None
    where: str = ""
    code: int = 0
    weights: Tensors | None = None
    # What the script has found, by rank.
    found: dict[int, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    stuck: bool = False

    def ended_with(self, error: BaseException) -> None:
        """Take an error down, unless there is one already."""
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            self.code = self.code or code
        elif self.error is None:
            self.error = error
            self.where = "".join(traceback.format_exception(error))
            self.code = self.code or getattr(error, "exit_code", 1)


@contextlib.contextmanager
def found_in(start: Path, played: Played) -> Iterator[None]:
    """Scripts write what they find to files with this start, which are read at the end."""
    with mock.patch.dict(os.environ, {"FOUND": str(start)}):
        yield
    for path in sorted(start.parent.glob(f"{start.name}-*.pt")):
        played.found[int(path.stem.rpartition("-")[2])] = torch.load(path, weights_only=False)
