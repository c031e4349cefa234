"""Whether what came of a script is what must: equal to plain torch, or refused in a sentence of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paramserver import errors
from tests.support.behaviour.generate import Script
from tests.support.behaviour.played import Played
from tests.support.pieces.base import Verdict

# The text of the exceptions that scripts raise on purpose.
PLANNED = "the cat"
# How a problem begins that is none of paramserver.
WRONG = "the script is wrong"
# With which a script may be refused.
_REFUSALS = (errors.UserError, errors.NonFiniteError)


def judge(script: Script, wanted: Played, played: Played) -> str:
    """What is wrong, or nothing. ``wanted``: what plain torch does."""
    if script.verdict is not Verdict.REFUSED and wanted.error is not None and str(wanted.error) != PLANNED:
        return f"{WRONG}: plain torch ends with {wanted.where}"
    if played.stuck:
        return "it is stuck"
    if script.verdict is not Verdict.EQUAL and isinstance(played.error, _REFUSALS):
        if script.says and not any(part in str(played.error) for part in script.says):
            return f"it is refused with {played.error!s:.300}, which names none of {', '.join(script.says)}"
        return "" if played.code else "it is refused, and ends with exit code 0"
    if script.verdict is Verdict.REFUSED:
        return f"it must be refused, and {'ends well' if played.error is None else 'fails otherwise: ' + played.where}"
    if type(played.error) is not type(wanted.error):
        return f"it ends with {played.where or 'no error'}, plain torch with {wanted.where or 'no error'}"
    if played.code != wanted.code and not (script.form.real and played.code and wanted.code):
        return f"its exit code is {played.code}, that of plain torch {wanted.code}"
    if wanted.code:
        return ""  # what is left of a job that failed is not promised
    return _compare(script, wanted, played)


def _compare(script: Script, wanted: Played, played: Played) -> str:
    problem = ""
    if wanted.weights is not None:
        if played.weights is None:
            return "no weights are left"
        problem = differs(dict(wanted.weights), dict(played.weights), script.tolerance, "weights", False)
    if problem or not wanted.found:
        return problem
    if not played.found:
        return "the script has not come to its end"
    mine = wanted.found[0]
    for rank, found in played.found.items():
        # Losses are those of slices, which only one worker with one slice in a step sees in order, each once.
        whole = script.form.workers == 1 and script.form.slices == 1 and not (script.form.kills or script.form.again)
        keys = [key for key in mine if whole or key != "seen"]
        want = {k: mine[k] for k in keys}
        if script.form.workers > 1 or script.form.kills:  # one that comes late begins with the epoch at hand
            for key in {"scores", "epochs"} & mine.keys():
                want[key] = {epoch: value for epoch, value in mine[key].items() if epoch in found.get(key, ())}
                found.setdefault(key, {})
        problem = differs(want, found, script.tolerance, f"found by worker {rank}", False)
        if problem:
            return problem
    return ""


def differs(wanted: Any, got: Any, tolerance: float, name: str, exact: bool = True) -> str:
    """Where two values are not the same within the tolerance. ``exact``: no more keys than those wanted."""
    if isinstance(wanted, np.ndarray):
        if not isinstance(got, np.ndarray) or wanted.dtype != got.dtype:
            return f"{name} is {got!r:.100}, with plain torch {wanted!r:.100}"
        wanted, got = torch.from_numpy(wanted), torch.from_numpy(got)
    if isinstance(wanted, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"{name} is {got!r:.100}, not a tensor"
        if wanted.shape != got.shape:
            return f"{name} has shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
        one, two = wanted.detach().double(), got.detach().double()
        if not torch.allclose(two, one, rtol=tolerance, atol=tolerance * 0.1, equal_nan=True):
            return f"{name} is {two.flatten()[:6].tolist()}, with plain torch {one.flatten()[:6].tolist()}"
        return ""
    if isinstance(wanted, Mapping):
        if not isinstance(got, Mapping):
            return f"{name} is {got!r:.100}, not a mapping"
        if missing := [key for key in wanted if key not in got]:
            return f"{name} lacks {missing}"
        if exact and (more := [key for key in got if key not in wanted]):
            return f"{name} has {more}, which plain torch has not"
        problems = (differs(wanted[key], got[key], tolerance, f"{name}: {key}") for key in wanted)
        return next((problem for problem in problems if problem), "")
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not isinstance(got, Sequence) or len(got) != len(wanted):
            return f"{name} has {got!r:.200}, with plain torch {wanted!r:.200}"
        problems = (differs(a, b, tolerance, f"{name}[{i}]") for i, (a, b) in enumerate(zip(wanted, got, strict=True)))
        return next((problem for problem in problems if problem), "")
    if isinstance(wanted, float) and isinstance(got, float):
        return differs(torch.tensor(wanted), torch.tensor(got), tolerance, name)
    return "" if wanted == got else f"{name} is {got!r:.100}, with plain torch {wanted!r:.100}"
