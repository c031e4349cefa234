"""What a script writes to weights that are trained: kept where it is put back, and otherwise an error, never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Outcome, train
from tests.support.cluster.programs import Aligned, dataset, sgd

BATCH, SAMPLES = 8, 48
Act = Callable[[nn.Module], None]
cross_entropy: Any = torch.nn.functional.cross_entropy


class Script:
    """Trains two epochs; ``acts`` are done to the model at certain moments."""

    def __init__(self, **acts: Act) -> None:
        self.acts = acts

    def at(self, moment: str, model: nn.Module) -> None:
        if moment in self.acts:
            self.acts[moment](model)

    def __call__(self, ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        assert (ctx.engine.weights.in_place is not None) == (ctx.engine.shards.transport == "shm")
        self.at("prepared", model)
        for _ in ctx.epochs(2):
            for number, (x, y) in enumerate(loader):
                if number == 1:
                    self.at("batch", model)
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 1:
                    self.at("stepped", model)
            self.at("epoch", model)


def copy_(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("first.weight").add_(1.0)


def data_copy(model: nn.Module) -> None:
    model.get_parameter("first.weight").data.add_(1.0)


def data_put(model: nn.Module) -> None:
    parameter = model.get_parameter("first.weight")
    parameter.data = torch.zeros_like(parameter)


def through_numpy(model: nn.Module) -> None:
    model.get_parameter("first.weight").detach().numpy()[3, 3] += 1.0


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def begin_anew(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


LOST: dict[str, Act] = {
    "copied over": copy_,
    "through data": data_copy,
    "other memory": data_put,
    "through NumPy": through_numpy,
    "clamped": clamp,
    "load_state_dict": load,
    "begun anew": begin_anew,
}


def run(script: Script, transport: str, mode: str) -> Outcome:
    return train(script, 1, 2, {"training__chunk_bytes": 16384}, transport=transport, mode=mode)


WAYS = [("grpc", "sync"), ("shm", "sync"), ("grpc", "async")]


MOMENTS = ("prepared", "batch", "stepped", "epoch")
CASES = [
    *((act, "grpc", "sync", ("prepared", "stepped")) for act in LOST),
    *((act, transport, mode, MOMENTS) for transport, mode in WAYS for act in ("copied over", "through data")),
]


@pytest.mark.parametrize(
    ("act", "transport", "mode", "moments"),
    [*CASES, *(pytest.param(act, *way, MOMENTS, marks=pytest.mark.long) for act in LOST for way in WAYS)],
)
def test_a_change_that_would_be_lost_ends_the_script(
    act: str, transport: str, mode: str, moments: Sequence[str]
) -> None:
    for moment in moments:
        with pytest.raises(errors.UserError, match=r"has changed the parameter 'first\.weight'.* Set weights before"):
            run(Script(**{moment: LOST[act]}), transport, mode)


def evaluate_with(swap: Callable[[nn.Parameter, torch.Tensor], None]) -> Act:
    """Other weights are swapped in and back."""

    def act(model: nn.Module) -> None:
        mine = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            swap(parameter, torch.zeros_like(parameter))
        assert not model(torch.ones(1, 8)).detach().any()
        for parameter, value in zip(model.parameters(), mine, strict=True):
            swap(parameter, value)

    return act


def swap_in_place(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def swap_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data.copy_(value)


def swap_memory(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data = value


def load_itself(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


KEPT: dict[str, Act] = {
    "copied": evaluate_with(swap_in_place),
    "through data": evaluate_with(swap_data),
    "other memory": evaluate_with(swap_memory),
    "its own state": load_itself,
}


@pytest.mark.parametrize(("transport", "mode"), WAYS, ids=["-".join(way) for way in WAYS])
def test_what_is_put_back_changes_nothing(transport: str, mode: str) -> None:
    plain = run(Script(), transport, mode)
    for act in KEPT.values():
        assert run(Script(prepared=act, batch=act, stepped=act, epoch=act), transport, mode).digests == plain.digests


def test_of_a_large_model_a_trace_is_enough() -> None:
    """More than one parameter, several servers, rounded weights: the name is right."""

    def act(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("second.weight")[0, 0] += 1e-3

    with pytest.raises(errors.UserError, match=r"the parameter 'second\.weight' itself"):
        train(Script(batch=act), 2, 3, {"training__pull_precision": "bf16"})


def halved(model: nn.Module) -> None:
    model.half()


def test_another_type_is_refused() -> None:
    with pytest.raises(errors.ModelError, match=r"float32 and shape .* is float16 .* before ctx\.prepare"):
        train(Script(epoch=halved))


class Teacher(Aligned):
    """Has a buffer, and a parameter that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heat", torch.ones(3))
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)


def heat(model: nn.Module) -> None:
    model.get_buffer("heat").fill_(2.0)


def average(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("mean").add_(1.0)


def nothing(model: nn.Module) -> None:
    """Reads only."""
    model(torch.ones(2, 8))


WARNED: list[tuple[Act, str]] = [
    (heat, "the buffer 'heat' has been written to outside of a slice"),
    (average, "writes to the parameter 'mean', which the optimizer does not have"),
    (nothing, ""),
]


@pytest.mark.parametrize(("act", "sentence"), WARNED, ids=["a buffer", "a parameter of its own", "nothing"])
def test_what_is_lost_or_kept_here_only_is_said(act: Act, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[float] = []

    def script(ctx: Context) -> None:
        model: Any = Teacher()
        given = sgd([model.first.weight, model.second.weight])
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, given, loader)
        for _ in ctx.epochs(2):
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            act(model)
        kept.append(float(model.mean.sum()))

    train(script, 1, 1)
    told = capsys.readouterr()
    said = [line for line in (told.out + told.err).splitlines() if "warning" in line]
    assert [sentence in line for line in said] == [True] * bool(sentence)
    assert kept == [8.0 if act is average else 0.0]


# ---- after the last step


def doubled(model: nn.Module) -> None:
    """Leaves a trace."""
    with torch.no_grad():
        model.get_parameter("second.weight").mul_(2.0)


def smoothed(model: nn.Module) -> None:
    """Leaves none."""
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


LAST: list[tuple[Act, str, str]] = [
    (doubled, "grpc", "changed the parameter 'second.weight' after its last step: the job's result"),
    (smoothed, "grpc", "changed the parameter 'first.weight' (and 1 more) after its last step: the job's result"),
    (smoothed, "shm", "changed the parameter 'first.weight' (and 1 more) after its last step: the job's result"),
    (average, "grpc", "writes to the parameter 'mean', which the optimizer does not have"),
    (evaluate_with(swap_data), "shm", ""),
    (halved, "grpc", ""),
]


def last(ctx: Context, act: Act) -> None:
    """Trains two epochs, over shared memory in a plain loop; then comes ``act``."""
    model: Any = Teacher()
    given = sgd([model.first.weight, model.second.weight])
    loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
    model, optimizer, loader = ctx.prepare(model, given, loader)
    for _ in range(2) if ctx.engine.shards.transport == "shm" else ctx.epochs(2):
        for x, y in loader:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    act(model)


def warnings_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    told = capsys.readouterr()
    return [line for line in (told.out + told.err).splitlines() if "warning" in line]


@cache
def unchanged() -> tuple[str, ...]:
    """The digests of a script that changes nothing."""
    return train(lambda ctx: last(ctx, nothing), 1, 2).digests


@pytest.mark.parametrize(("act", "transport", "sentence"), LAST)
def test_what_is_changed_after_the_last_step_is_said(
    act: Act, transport: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job is done, so that is no error; its result is that of the job."""
    wanted = unchanged()
    warnings_of(capsys)
    assert train(lambda ctx: last(ctx, act), 1, 2, transport=transport).digests == wanted
    assert [sentence in line for line in warnings_of(capsys)] == [True] * bool(sentence)


def test_of_a_script_that_fails_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def script(ctx: Context) -> None:
        with ctx:
            last(ctx, doubled)
            raise LookupError

    with pytest.raises(LookupError):
        train(script, 1, 1)
    assert not warnings_of(capsys)
