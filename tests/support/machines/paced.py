"""workers/digits.py, but every slice takes a while until a file appears: time for a test to do something meanwhile."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import Any

import torch.nn.functional as F

PACE_S = float(os.environ.get("MACHINES_PACE_S", "0.3"))
DIGITS = Path(__file__).resolve().parents[3] / "workers" / "digits.py"

_hurry = Path(os.environ["MACHINES_HURRY"])
_cross_entropy: Any = F.cross_entropy


def _after_a_while(*args: Any, **options: Any) -> Any:
    if not _hurry.exists():
        time.sleep(PACE_S)
    return _cross_entropy(*args, **options)


F.cross_entropy = _after_a_while
runpy.run_path(str(DIGITS), run_name="__main__")
