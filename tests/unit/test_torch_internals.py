"""Interfaces of torch that are not public, on which waiting for single parameters rests (`worker/weights/reads.py`).

If torch changes one of them, a test here says which. `make test-low` runs them with the lowest torch, `make test` with
the one in constraints.txt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import eval_frame
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

X = torch.ones(2, 4)


class Log(TorchFunctionMode):
    """Notes which functions torch tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def stack() -> list[Any]:
    found: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return found


def enter(mode: TorchFunctionMode) -> None:
    mode.__enter__()  # type: ignore[no-untyped-call]


def leave(mode: TorchFunctionMode) -> None:
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def heard(work: Callable[[], object]) -> list[object]:
    log = Log()
    enter(log)
    try:
        work()
    finally:
        leave(log)
    return log.seen


def test_modes_are_entered_and_left_apart_and_the_newest_is_last_on_the_stack() -> None:
    """`_get_current_function_mode_stack`, `TorchFunctionMode.__enter__`, `.__exit__`."""
    first, second = Log(), Log()
    assert stack() == []
    enter(first)
    enter(second)
    try:
        assert stack() == [first, second]
    finally:
        leave(second)
        assert stack() == [first]
        leave(first)
    assert stack() == []


def test_each_thread_has_a_stack_of_its_own() -> None:
    found: list[list[Any]] = []
    log = Log()
    enter(log)
    try:
        thread = threading.Thread(target=lambda: found.append(stack()))
        thread.start()
        thread.join()
    finally:
        leave(log)
    assert found == [[]]


def test_getters_and_setters_of_properties_are_told_as_slots_of_the_class() -> None:
    """So that properties that are no reads can be told from others: `torch.Tensor.grad.__get__`."""
    parameter = nn.Parameter(torch.ones(4))

    def work() -> None:
        parameter.grad = torch.ones(4)
        parameter.requires_grad = parameter.grad is not None

    slots: Any = torch.Tensor
    assert heard(work)[-3:] == [slots.grad.__set__, slots.grad.__get__, slots.requires_grad.__set__]


def test_a_module_s_call_is_told_and_its_parameters_are_arguments() -> None:
    assert heard(lambda: nn.Linear(4, 4, device="meta")(X.to("meta")))[-1] is F.linear


def test_a_backward_pass_is_told_as_a_whole() -> None:
    """`torch.Tensor.backward` is told of, what is computed within is not."""
    weight = nn.Parameter(torch.ones(4))

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return torch.neg(gradients[0])

    apply: Any = Doubled.apply
    loss = apply(weight).sum()
    seen = heard(loss.backward)
    assert torch.Tensor.backward in seen
    assert torch.neg not in seen


def test_nothing_is_told_where_torch_functions_are_disabled() -> None:
    """`torch._C.DisableTorchFunction`."""

    def work() -> None:
        with torch._C.DisableTorchFunction():
            X.sum()

    assert heard(work) == []


def test_dynamo_keeps_the_backends_that_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._dynamo.eval_frame.cached_backends`: empty until something is compiled."""
    assert isinstance(eval_frame.cached_backends, dict)
    monkeypatch.setattr(eval_frame, "cached_backends", {})

    def increment(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert torch.equal(torch.compile(increment, backend="eager")(X), X + 1)
    assert any(backend is not None for backend in eval_frame.cached_backends.values())
