"""Optimizers of the user's own: they train as in plain torch, on servers whose configuration names them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.tensors.own import allow
from paramserver.worker.context import Context
from tests.support.cluster.harness import alone, inside, train
from tests.support.cluster.programs import Aligned, Program, dataset
from tests.support.cluster.reference import slice_by_slice, slices_of_steps
from tests.support.failover.rollback import Rig, Strike, same, twin
from tests.support.own_optimizers import Bounded, Careless, Lion, Normed, Silent

SAMPLES, BATCH = 64, 8
cross_entropy: Any = nn.functional.cross_entropy
MAKE: dict[str, Any] = {
    "elementwise": lambda p: Lion(p, lr=0.01, decay=0.1),
    "whole tensors": lambda p: Normed(p, lr=0.1, rounds=3),
    "weights within a bound": lambda p: Bounded(p, lr=0.1),
}


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    allow(f"{kind.__module__}:{kind.__name__}" for kind in (Lion, Normed, Careless, Bounded))
    yield
    allow(())


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", MAKE)
def test_it_has_the_bits_of_plain_torch_and_goes_on_from_the_state_that_a_script_brings(
    name: str, servers: int
) -> None:
    data, saved = dataset(SAMPLES), []

    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Aligned()
        optimizer = MAKE[name](model.parameters())
        slice_by_slice(model, optimizer, list(slices_of_steps(data, BATCH, 1, 1))[:3], cross_entropy)
        optimizer.zero_grad()
        return model, optimizer

    def script(ctx: Context) -> None:
        model: Any
        model, optimizer = begun()
        model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))
        for _ in ctx.epochs(2):
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        saved.append(optimizer.state_dict())

    outcome = train(script, 1, servers, {"training__chunk_bytes": 128}, slices_per_step=1)
    model, plain = begun()
    slice_by_slice(model, plain, list(slices_of_steps(data, BATCH, 1, 2)), cross_entropy)
    for key, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(key), parameter.detach()), key
    theirs = plain.state_dict()
    assert saved[0]["param_groups"] == theirs["param_groups"]
    for number, states in theirs["state"].items():
        assert saved[0]["state"][number].keys() == states.keys()
        for key, value in states.items():
            assert type(saved[0]["state"][number][key]) is type(value)
            assert torch.equal(torch.as_tensor(saved[0]["state"][number][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("name", [pytest.param("elementwise", marks=pytest.mark.long), "whole tensors"])
def test_a_job_that_went_back_has_the_same_bits(name: str, tmp_path: Path) -> None:
    program = Program(dataset(128), BATCH, 2, Aligned, MAKE[name])
    wanted = twin(f"own {name}", program, 128, slices_per_step=4)
    with Rig(tmp_path, 3, [Strike("commit.before_log", "server-1", 5)], training__chunk_bytes=128) as rig:
        rig.begin(program)
        summary = rig.finish()
        assert rig.rollbacks == 1
    same(summary, wanted)


def test_a_script_that_trains_alone_needs_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(())
    program = Program(dataset(SAMPLES), BATCH, 1, Aligned, MAKE["whole tensors"])
    assert alone(program, tmp_path, monkeypatch)["steps"] == SAMPLES // BATCH


def refused(optimizer: Any, sentence: str) -> None:
    def work(ctx: Context) -> None:
        model = Aligned()
        with pytest.raises(errors.ModelError, match=sentence):
            ctx.prepare(model, optimizer(model.parameters()))

    inside(work)


def test_servers_that_do_not_name_it_refuse_it() -> None:
    allow(["another.module:Lion"])
    refused(Lion, r"does not run the optimizer tests\.support\.own_optimizers:Lion: name it in its cluster\.optimizers")


def test_what_cannot_be_run_is_refused_before_the_job_begins() -> None:
    refused(Silent, "Silent is not supported")
    refused(lambda p: Lion(p, lr="fast"), "the hyper-parameter lr is 'fast': servers take numbers")  # type: ignore[arg-type]
    allow(["tests.support.own_optimizers:Gone"])
    local: Any = type("Gone", (Lion,), {"__module__": "tests.support.own_optimizers", "__qualname__": "Gone"})
    local.__paramserver__ = Lion.__paramserver__  # type: ignore[attr-defined]
    refused(local, "cannot import the optimizer tests.support.own_optimizers:Gone")


def test_a_class_that_keeps_other_state_than_it_declares_ends_the_job() -> None:
    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = Careless(model.parameters())
        model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(dataset(SAMPLES), batch_size=BATCH))
        for _ in ctx.epochs(1):
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()

    with pytest.raises(errors.ParamServerError, match=r"keeps the state \['exp_avg'\] and declares \['other'\]"):
        train(script, 1, 1, slices_per_step=1)
