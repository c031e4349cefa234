"""Optimizers without torch's compiler: not loaded where nobody needs it, and as torch has them where somebody does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paramserver.tensors import uncompiled


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
