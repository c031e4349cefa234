"""What tells of reads: every way in which a script may look at its parameters, and none in which it does not."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack

from paramserver.worker.weights.reads import Reads


class Flat(nn.Module):
    """Two layers, whose parameters are views of one flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        flat, at = torch.randn(36), 0
        for parameter in self.parameters():
            parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class Told:
    """First layer: weight 0, bias 1; second: weight 2."""

    def __init__(self) -> None:
        self.read_ones: set[int] = set()
        self.all = self.whole = False

    def read(self, tensor: int) -> None:
        self.read_ones.add(tensor)

    def read_all(self) -> None:
        self.all = True

    def complete(self) -> None:
        self.whole = True


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


SCALED: Any = Scaled.apply
MODEL, X = Flat(), torch.randn(2, 4)
W, B, W2 = MODEL.parameters()


@pytest.fixture
def reads() -> Iterator[Reads]:
    found = Reads(list(MODEL.parameters()))
    yield found
    found.end()
    assert not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]


def views() -> list[torch.Tensor]:
    return [parameter.detach() for parameter in MODEL.parameters()]


def seen(reads: Reads, work: Callable[[], object]) -> Told:
    told = Told()
    assert reads.begin(told, views())
    try:
        work()
    finally:
        reads.end()
    return told


READS: dict[str, tuple[Callable[[], object], set[int]]] = {
    "a module": (lambda: MODEL.first(X), {0, 1}),
    "all modules": (lambda: MODEL(X), {0, 1, 2}),
    "another module's": (lambda: F.linear(X, MODEL.first.weight), {0}),
    "an operator": (lambda: X @ W2, {2}),
    "in a list": (lambda: torch.cat([B, B]), {1}),
    "by keyword": (lambda: F.linear(X, weight=W2), {2}),
    "several at once": (lambda: torch._foreach_norm([W, B]), {0, 1}),
    "a function of its own": (lambda: SCALED(W), {0}),
    "detached": (lambda: B.detach(), {1}),
    "its numbers": (lambda: B.tolist(), {1}),
    "one number": (lambda: B[0].item(), {1}),
    "as an array": (lambda: W.data.numpy(), {0}),
    "its memory": (lambda: W2.data_ptr(), {2}),
    "its storage": (lambda: W2.untyped_storage(), {2}),
    "written to": (lambda: torch.no_grad()(B.zero_)(), {1}),
    "printed": (lambda: repr(B), {1}),
    "a state dict": (lambda: MODEL.state_dict(), {0, 1, 2}),
    "copied": (lambda: copy.deepcopy(MODEL), {0, 1, 2}),
    "saved": (lambda: torch.save(MODEL, io.BytesIO()), {0, 1, 2}),
    "pickled": (lambda: pickle.dumps(B), {1}),
    "as a vector": (lambda: nn.utils.parameters_to_vector(MODEL.parameters()), {0, 1, 2}),
    "called as a function": (
        lambda: torch.func.functional_call(MODEL, dict(MODEL.named_parameters()), (X,)),
        {0, 1, 2},
    ),
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_told(name: str, reads: Reads) -> None:
    work, which = READS[name]
    told = seen(reads, work)
    assert told.read_ones == which
    assert not told.whole


HARMLESS: dict[str, Callable[[], object]] = {
    "gradients are zeroed": MODEL.zero_grad,
    "gradients are looked at": lambda: [parameter.grad for parameter in MODEL.parameters()],
    "shapes are": lambda: [(p.shape, p.dtype, p.device, p.size(0), p.numel(), p.dim()) for p in MODEL.parameters()],
    "it is asked which are trained": lambda: [p.requires_grad for p in MODEL.parameters()],
    "they are frozen and thawed": lambda: MODEL.requires_grad_(False).requires_grad_(True),
    "an optimizer is made": lambda: torch.optim.SGD(MODEL.parameters(), lr=0.1).zero_grad(),
    "they are in a set": lambda: {W, B, W2},
    "the batch is": lambda: (X * 2).sum().item(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_reads_nothing_is_not_told(name: str, reads: Reads) -> None:
    told = seen(reads, HARMLESS[name])
    assert (told.read_ones, told.all, told.whole) == (set(), False, False)


ALIASES: dict[str, tuple[torch.Tensor, set[int]]] = {
    "the same": (W.data, {0}),
    "transposed": (W2.data.t(), {2}),
    "a part": (B.data[1:3], {1}),
    "every other number": (W.data.flatten()[::2], {0}),
    "across two": (W.data.as_strided((6,), (1,), 12), {0, 1}),
    "from the first to the last": (W.data.as_strided((2,), (35,), 0), {0, 1, 2}),
    "nothing of them": (torch.zeros(36), set()),
    "no numbers at all": (W.data[:0], set()),
}


@pytest.mark.parametrize("name", ALIASES)
def test_what_shares_their_memory_counts(name: str, reads: Reads) -> None:
    alias, which = ALIASES[name]
    told = seen(reads, lambda: alias.sum())
    assert told.read_ones == which
    assert not told.all


def test_parameters_that_the_script_has_put_elsewhere_are_not_waited_for(reads: Reads) -> None:
    assert not reads.begin(Told(), [torch.zeros_like(view) for view in views()])


def test_who_reads_through_something_else_may_read_anything(reads: Reads) -> None:
    def loss(weights: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(MODEL, weights, (X,)).sum()

    assert seen(reads, lambda: torch.func.grad(loss)(dict(MODEL.named_parameters()))).all


def test_within_a_backward_pass_nothing_is_told_so_it_is_complete_before(reads: Reads) -> None:
    loss = MODEL.first(X).sum()
    told = seen(reads, loss.backward)
    assert (told.read_ones, told.all, told.whole) == (set(), False, True)


def test_other_threads_are_not_told_of(reads: Reads) -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: MODEL(X))
        thread.start()
        thread.join()

    assert not seen(reads, elsewhere).read_ones


def test_within_a_mode_of_the_script_it_does_not_begin(reads: Reads) -> None:
    with BaseTorchFunctionMode():
        assert not reads.begin(Told(), views())


def test_below_a_mode_of_the_script_it_ends_silently_and_begins_again(reads: Reads) -> None:
    first, second = Told(), Told()
    assert reads.begin(first, views())
    with BaseTorchFunctionMode():
        MODEL.first(X)
        reads.end()
        MODEL.second(X)
        assert reads.begin(second, views())
        MODEL.second(X)
    assert first.read_ones == {0, 1}
    assert second.read_ones == {2}
