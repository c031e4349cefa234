"""A model with several optimizers: what plain torch does with them, whoever dies, and what is refused."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.checkpoint.catalog import newest
from paramserver.checkpoint.export import export
from paramserver.checkpoint.place import Place
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Outcome, inside, train
from tests.support.cluster.programs import dataset
from tests.support.failover.resizing import Between, resize
from tests.support.failover.rollback import Rig, Stop, Strike, same, twin
from tests.support.turns.pair import BATCH, EPOCHS, SAMPLES, Mixed, Pair, optimizers_of, with_plain_torch

SLICES = 4
# The largest tensor has twelve chunks.
CHUNK: dict[str, Any] = {"training__chunk_bytes": 512}


def run(workers: int, servers: int, script: Any, **settings: Any) -> Outcome:
    return train(script, workers, servers, CHUNK, slices_per_step=SLICES, **settings)


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two state dicts of an optimizer have the same bits."""
    assert one["state"].keys() == other["state"].keys()
    for number, here in one["state"].items():
        there = other["state"][number]
        assert here.keys() == there.keys()
        assert all(torch.equal(torch.as_tensor(here[key]), torch.as_tensor(there[key])) for key in here)


@cache
def digests() -> tuple[str, str, str]:
    """Of a job with one worker and one server."""
    return run(1, 1, Pair()).digests


def expected() -> Any:
    """Undisturbed, with one worker and one server."""
    return twin("two optimizers", Pair(), CHUNK["training__chunk_bytes"], slices_per_step=SLICES)


def test_the_bits_are_those_of_plain_torch() -> None:
    script = Pair()
    train(script, 1, 1, CHUNK, slices_per_step=1)
    model, optimizers = with_plain_torch()
    (state,) = script.states
    for name, value in model.state_dict().items():
        assert torch.equal(state["model"][name], value), name
    for found, optimizer in zip(state["optimizer"], optimizers, strict=True):
        plain = optimizer.state_dict()
        equal(found, plain)
        rates = [[group["lr"] for group in groups] for groups in (found["param_groups"], plain["param_groups"])]
        assert rates[0] == rates[1]
        optimizer.load_state_dict(found)


def test_several_slices_in_a_step_are_a_larger_batch_of_plain_torch() -> None:
    script = Pair()
    run(2, 2, script)
    model, _ = with_plain_torch(SLICES)
    for state in script.states:
        for name, value in model.state_dict().items():
            assert torch.equal(state["model"][name], value), name


@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (1, 3), (2, 2)])
def test_the_bits_do_not_depend_on_the_number_of_workers_and_servers(workers: int, servers: int) -> None:
    assert run(workers, servers, Pair()).digests == digests()


def test_each_optimizer_may_clear_its_gradients_after_its_step() -> None:
    assert run(2, 1, Pair(clear=True)).digests == digests()


def test_each_scheduler_may_step_directly_after_its_optimizer() -> None:
    assert run(2, 2, Pair(pairwise=True, clear=True)).digests == digests()


def test_learning_rates_that_change_by_hand_between_two_optimizers_count_from_the_next_step_on() -> None:
    script = Pair(scheduled=False)
    train(script, 1, 1, CHUNK, slices_per_step=1)
    model, _ = with_plain_torch(scheduled=False)
    assert all(torch.equal(script.states[0]["model"][name], value) for name, value in model.state_dict().items())


def test_a_worker_that_dies_changes_no_bit() -> None:
    died: list[int] = []

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 3 and not died:
            died.append(slices)
            raise Died

    assert run(2, 2, Pair(each)).digests == digests()
    assert died == [3]


def test_every_slice_counts_once_in_asynchronous_mode() -> None:
    with Cluster(2, 2, mode="async", staleness=2) as cluster:
        outcome = cluster.train(Pair(), CHUNK)
    assert outcome.result.version == EPOCHS * SAMPLES // BATCH


# ---- checkpoints, copies, other numbers of servers


def test_a_job_that_was_resumed_and_went_back_has_the_same_bits(tmp_path: Path) -> None:
    """It ends after version 3; with another number of servers it goes on from version 2, and goes back."""
    stop = Stop(3)
    with Rig(tmp_path, 2, servers=2, **CHUNK) as rig:
        rig.begin(Pair(stop))
        rig.end_at(stop, 2)
    strike = Strike("commit.before_log", "server-1", 4)
    with Rig(tmp_path, 2, [strike], servers=3, checkpoint__resume=str(tmp_path / "ckpt"), **CHUNK) as rig:
        rig.begin(Pair())
        summary = rig.finish()
        assert strike.fired
        assert rig.rollbacks == 1
    same(summary, expected())


def test_a_backup_goes_on(tmp_path: Path) -> None:
    with Rig(tmp_path, 0, [Strike("apply.mid", "server-1", 3)], cluster__replicas=1, **CHUNK) as rig:
        rig.begin(Pair())
        summary = rig.finish()
        assert rig.rollbacks == 0
        assert rig.record().promotions >= 1
    same(summary, expected())


def test_another_number_of_servers_has_the_same_bits(tmp_path: Path) -> None:
    held = Between(2)
    with Rig(tmp_path, 0, servers=1, cluster__replicas=0, **CHUNK) as rig:
        rig.begin(Pair(held))
        resize(rig, held, (3, 2))
        summary = rig.finish()
        assert rig.rollbacks == 0
    same(summary, expected())


def test_an_exported_checkpoint_has_the_state_of_each_optimizer(tmp_path: Path) -> None:
    script = Pair()
    with Rig(tmp_path, 2, servers=2, **CHUNK) as rig:
        rig.begin(script)
        rig.finish()
    place = Place(str(tmp_path / "ckpt"))
    manifest = newest(place)
    assert manifest is not None
    export(place, manifest, "torch", tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt")
    model = Mixed()
    model.load_state_dict(content["model"])
    for optimizer, state, found in zip(
        optimizers_of(model), content["optimizer"], script.states[0]["optimizer"], strict=True
    ):
        optimizer.load_state_dict(state)
        equal(state, found)
    assert content["optimizer_names"][0] == ["first.weight", "second.weight"]


def test_what_is_loaded_is_what_a_job_goes_on_from() -> None:
    saved = Pair(scheduled=False)
    train(saved, 1, 1, CHUNK, slices_per_step=1)
    (state,) = saved.states
    loaded: list[dict[str, Any]] = []

    def script(ctx: Context) -> None:
        model: Any = Mixed()
        model, *_ = ctx.prepare(model, *optimizers_of(model), DataLoader(dataset(SAMPLES), batch_size=BATCH))
        ctx.load(state)
        loaded.append(ctx.state_dict())
        with pytest.raises(errors.ModelError, match=r"the state of 1 optimizer.*the model has 2"):
            ctx.load(optimizer=state["optimizer"][0])

    inside(script)
    assert all(torch.equal(loaded[0]["model"][key], value) for key, value in state["model"].items())
    for one, other in zip(loaded[0]["optimizer"], state["optimizer"], strict=True):
        equal(one, other)


def test_state_that_the_optimizers_bring_is_what_the_job_begins_with() -> None:
    model, optimizers = with_plain_torch()
    found: list[dict[str, Any]] = []

    def script(ctx: Context) -> None:
        ctx.prepare(model, *optimizers)
        found.append(ctx.state_dict())

    before = [copy.deepcopy(one.state_dict()) for one in optimizers]
    inside(script)
    for one, other in zip(found[0]["optimizer"], before, strict=True):
        equal(one, other)


# ---- refused


def loop(ctx: Context, body: Any) -> None:
    model: Any = Mixed()
    model, muon, adamw, loader = ctx.prepare(
        model, *optimizers_of(model), DataLoader(dataset(SAMPLES), batch_size=BATCH)
    )
    for x, _ in loader:
        model(x).square().mean().backward()
        body(muon, adamw)


def only_one(muon: Any, adamw: Any) -> None:
    muon.step()


def twice(muon: Any, adamw: Any) -> None:
    muon.step()
    muon.step()


def zeroed(muon: Any, adamw: Any) -> None:
    muon.step()
    muon.zero_grad(set_to_none=False)
    adamw.step()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (only_one, "Muon stepped on a batch, and AdamW did not"),
        (twice, "Muon steps again before AdamW has stepped"),
        (zeroed, "gradients of Muon have changed between its step"),
    ],
)
def test_steps_that_would_be_lost_are_refused(body: Any, sentence: str) -> None:
    def script(ctx: Context) -> None:
        with pytest.raises(errors.UserError, match=sentence):
            loop(ctx, body)
        raise Died

    with pytest.raises(Died):
        inside(script)


def test_a_step_outside_of_the_loop_is_refused() -> None:
    def script(ctx: Context) -> None:
        model: Any = Mixed()
        model, muon, _, _ = ctx.prepare(model, *optimizers_of(model), DataLoader(dataset(BATCH), batch_size=BATCH))
        with pytest.raises(errors.UserError, match="comes before any iteration over the prepared loader"):
            muon.step()

    inside(script)


def test_without_a_loader_a_last_step_of_some_optimizers_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    versions: list[int] = []

    def script(ctx: Context) -> None:
        model: Any = Mixed()
        model, muon, adamw = ctx.prepare(model, *optimizers_of(model))
        for _ in range(2):
            model(torch.ones(4, 8)).square().mean().backward()
            muon.step()
            adamw.step()
            model.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        muon.step()
        versions.append(ctx.version)

    inside(script)
    assert versions == [2]
    assert "the last step is lost: Muon stepped on a batch, and AdamW did not" in "".join(capfd.readouterr())


@pytest.mark.parametrize("overflows", [False, True])
def test_a_grad_scaler_steps_with_each_optimizer(overflows: bool) -> None:
    """An overflow in the gradients of one optimizer skips the whole step."""
    seen: list[bool] = []

    def script(ctx: Context) -> None:
        model: Any = Mixed()
        muon, adamw = optimizers_of(model)
        model, muon, adamw, loader = ctx.prepare(model, muon, adamw, DataLoader(dataset(BATCH), batch_size=BATCH))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        before = {name: value.clone() for name, value in ctx.state_dict()["model"].items()}
        for x, _ in loader:
            scaler.scale(model(x).square().mean()).backward()
            if overflows:
                model.norm.weight.grad[0] = float("inf")
            scaler.step(muon)
            scaler.step(adamw)
            scaler.update()
        assert scaler.get_scale() == (128.0 if overflows else 256.0)
        after = ctx.state_dict()["model"]
        seen.append(any(not torch.equal(after[name], value) for name, value in before.items()))

    inside(script)
    assert seen == [not overflows]


def test_some_gradients_that_are_unscaled_and_others_that_are_not_are_refused() -> None:
    def script(ctx: Context) -> None:
        model: Any = Mixed()
        muon, adamw = optimizers_of(model)
        model, muon, adamw, loader = ctx.prepare(model, muon, adamw, DataLoader(dataset(BATCH), batch_size=BATCH))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for x, _ in loader:
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(muon)
            scaler.step(muon)
            with pytest.raises(errors.UserError, match=r"call scaler\.unscale_ for all optimizers or for none"):
                scaler.step(adamw)
            raise Died

    with pytest.raises(Died):
        inside(script)


def test_optimizers_that_do_not_fit_are_refused() -> None:
    def script(ctx: Context) -> None:
        model = nn.Linear(3, 2)
        one, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam([model.weight])
        with pytest.raises(errors.ModelError, match="the optimizers have parameter 'weight' twice"):
            ctx.prepare(model, one, other)
        with pytest.raises(errors.UserError, match="not list: give it each object as an argument of its own"):
            ctx.prepare(model, [one, other])
        with pytest.raises(errors.ModelError, match="several optimizers were given"):
            ctx.prepare(model, one, other, name="model")
        ctx.prepare(model, one)

    inside(script)
