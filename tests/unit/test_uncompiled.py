"""Optimizers without torch's compiler: not loaded where nobody needs it, and as torch has them where somebody does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from paramserver.tensors import uncompiled

SCRIPT = """
import sys, torch
from paramserver.tensors.uncompiled import postpone_compiler, step
postpone_compiler()
postpone_compiler()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.5)
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
(2.0 * weight).sum().backward()
step(optimizer)
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert weight.tolist() == [0.0] * 3 and weight.grad is None
assert "torch._dynamo" not in sys.modules, "the compiler was loaded"
weight.grad = torch.ones(3)
optimizer.step()
assert "torch._dynamo" in sys.modules, "torch itself loads it no more: uncompiled.py is not needed any longer"
assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
assert torch.optim.Optimizer.state_dict.__wrapped__.__dynamo_disable is not None
assert "plain" not in torch.optim.Optimizer.state_dict.__wrapped__.__dynamo_disable.__qualname__
"""


def test_a_process_that_compiles_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("loaded", [False, True])
def test_as_torch_has_it_once_the_compiler_is_there(loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def inner(word: str) -> str:
        return f"inner {word}"

    def outer(word: str) -> str:
        kept: Any = getattr(inner, "__dynamo_disable", None)
        calls.append("outer" if kept is None else "kept")
        return f"outer {word}" if kept is None else str(kept(word))

    monkeypatch.setattr(uncompiled, "_COMPILER", "sys" if loaded else "no such module")
    uncompiled._postpone(outer, inner)
    assert outer("call") == ("outer call" if loaded else "inner call")
    assert calls == (["kept", "outer"] if loaded else ["kept"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_step_has_the_bits_of_torchs_own(kind: Any) -> None:
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 33)) for _ in "ab")
    a, b = kind([ours], lr=0.1), kind([theirs], lr=0.1)
    for number in range(3):
        ours.grad, theirs.grad = torch.full((33,), number - 0.7), torch.full((33,), number - 0.7)
        uncompiled.step(a)
        b.step()
    assert torch.equal(ours, theirs)
