"""``ctx.load``: the job goes on from what the scripts load, as plain torch does; all of it or nothing."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Outcome, alone, inside, train, until, wait
from tests.support.cluster.programs import Aligned, dataset
from tests.support.cluster.reference import slice_by_slice, slices_of_steps
from tests.support.failover.loading import BATCH, SAMPLES, adamw, cross_entropy, saved, script_loading
from tests.support.failover.rollback import Rig, Strike, same


def plain(at: int, slices_per_step: int = 1, epochs: int = 3, **what: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What plain torch makes of it."""
    model = Aligned()
    optimizer = adamw(model.parameters())
    steps = list(slices_of_steps(dataset(SAMPLES), BATCH, slices_per_step, epochs))
    per_epoch = len(steps) // epochs
    before = max(at, 0) * per_epoch
    slice_by_slice(model, optimizer, steps[:before], cross_entropy)
    if "model" in what:
        model.load_state_dict(what["model"])
    if "optimizer" in what:
        optimizer.load_state_dict(what["optimizer"])
    slice_by_slice(model, optimizer, steps[before:], cross_entropy)
    return model, optimizer


def assert_same(outcome: Outcome, model: nn.Module) -> None:
    """Not one bit of the weights differs."""
    for key, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(key), parameter.detach()), key


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("at", [-1, 1])
@pytest.mark.parametrize("which", [("model", "optimizer"), ("model",), ("optimizer",)])
def test_what_is_loaded_counts_as_in_plain_torch(mode: str, at: int, which: tuple[str, ...]) -> None:
    """One worker, two servers; what is not loaded stays. The counts and the position in the data stay, too."""
    what = {key: saved(0.02 if at < 0 else 0.01)[key] for key in which}
    outcome = train(
        script_loading(at, **what), 1, 2, {"training__chunk_bytes": 256}, mode=mode, staleness=0, slices_per_step=1
    )
    model, _ = plain(at, **what)
    assert_same(outcome, model)
    assert outcome.summary["steps"] == 15
    assert outcome.summary["contributions_applied"] == 15


@pytest.mark.parametrize("checkpoints", [False, True])
def test_two_workers_load_in_the_middle(checkpoints: bool, tmp_path: Path) -> None:
    """Both hold the new weights when it returns."""
    what = saved()
    script = script_loading(1, **what)
    if checkpoints:
        with Rig(tmp_path, 2, workers=2, servers=2) as rig:
            rig.begin(script)
            summary = rig.finish()
        found = summary["weights_sha256"]
        assert summary["steps"] == 6
    else:
        found = train(script, 2, 2, slices_per_step=2).digests[0]
    one = train(script, 1, 1, slices_per_step=2 if not checkpoints else 4)
    assert found == one.digests[0]


def test_asynchronous_workers_load_between_epochs() -> None:
    """Each holds what the other is done with, and every slice counts once."""
    outcome = train(script_loading(1, **saved()), 2, 2, mode="async", staleness=1)
    assert outcome.summary["contributions_applied"] == 15


def test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = saved()
    summary = alone(script_loading(1, **what), tmp_path, monkeypatch)
    assert summary["weights_sha256"] == train(script_loading(1, **what)).digests[0]


def test_hyper_parameters_are_taken_over_and_buffers_loaded() -> None:
    def work(ctx: Context) -> None:
        def made() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

        other = made()
        other(torch.randn(16, 8))
        model: Any = made()
        model, optimizer = ctx.prepare(model, adamw(model.parameters()))
        ctx.load(model=other.state_dict(), optimizer=adamw(other.parameters(), 0.5).state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.5
        for key, value in other.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key
        assert int(model.state_dict()["1.num_batches_tracked"]) == 1

    inside(work)


def test_hyper_parameters_stay_in_the_middle_of_the_training() -> None:
    """Whoever comes later would not have others."""
    with pytest.raises(errors.ModelError, match=r"has lr = 0\.5, this optimizer has 0\.01"):
        train(script_loading(1, optimizer=saved(0.5)["optimizer"]))


def without(key: str) -> dict[str, Any]:
    state = saved()["model"]
    del state[key]
    return dict(state)


def test_what_does_not_fit_is_refused_and_nothing_has_happened() -> None:
    def work(ctx: Context) -> None:
        with pytest.raises(errors.UserError, match=r"belongs after ctx\.prepare"):
            ctx.load(model={})
        model: Any = Aligned()
        model, _ = ctx.prepare(model, adamw(model.parameters()))
        before = copy.deepcopy(model.state_dict())
        state = saved()
        key = "first.weight"
        for given, sentence in (
            ({}, "was given nothing"),
            ({"model": without(key)}, f"lacks '{key}'"),
            ({"model": {**state["model"], "more": torch.zeros(1)}}, "has 'more', which the model does not have"),
            ({"model": {**state["model"], key: torch.zeros(2)}}, r"has shape \(2,\)"),
            ({"model": {**state["model"], key: state["model"][key] * torch.nan}}, "NaN"),
            ({"optimizer": {"state": {}, "param_groups": []}}, "cannot take this optimizer state"),
            (
                {"optimizer": torch.optim.AdamW(Aligned().parameters(), amsgrad=True).state_dict()},
                "amsgrad cannot change",
            ),
        ):
            with pytest.raises(errors.UserError, match=sentence):
                ctx.load(**given)
        for name, value in before.items():
            assert torch.equal(model.state_dict()[name], value)

    inside(work)


def test_different_content_is_refused_in_all_workers() -> None:
    states = [saved(), saved()]
    states[1]["model"]["first.bias"] += 1

    def script(ctx: Context) -> None:
        script_loading(-1, **states[ctx.rank])(ctx)

    with Cluster(2, 1) as cluster:
        workers = [cluster.start(script) for _ in range(2)]
        until("both are refused", lambda: all(worker.error is not None for worker in workers))
        for worker in workers:
            assert isinstance(worker.error, errors.ModelError)
        assert any("different content" in str(worker.error) for worker in workers)


@pytest.mark.parametrize("ends", [False, True])
def test_a_worker_that_does_not_call_it_is_named(ends: bool) -> None:
    """It goes on to the next step, or its script ends."""
    what = saved()

    def script(ctx: Context) -> None:
        if ctx.rank == 0:
            script_loading(1, **what)(ctx)
        else:
            script_loading(-2, epochs=1 if ends else 1000)(ctx)
            until(
                "the other one waits for this one", lambda: "worker-1" in workers[0].context.engine.member.waiting_for
            )

    workers: list[Any] = []
    with Cluster(2, 2, slices_per_step=2) as cluster:
        workers += [cluster.start(script) for _ in range(2)]
        until("it is refused", lambda: any(worker.error is not None for worker in workers))
        (error,) = [worker.error for worker in workers if worker.error is not None]
        assert isinstance(error, errors.ModelError)
        assert "worker-1" in str(error)
        assert ("has ended" if ends else "gone on to the next step") in str(error)


def test_a_worker_that_comes_later_has_what_was_loaded() -> None:
    """Its script comes to the load, too, and passes; the bits are those of one worker."""
    what = saved()
    here, go = threading.Event(), threading.Event()

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = adamw(model.parameters())
        data: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, data)
        ctx.load(**what)
        if ctx.rank == 1:
            here.set()
        for epoch in ctx.epochs(3):
            if epoch == 1 and ctx.rank == 0:
                go.set()
                wait(here, "the other worker has passed the load")
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    with Cluster(1, 2, slices_per_step=2) as cluster:
        cluster.start(script)
        wait(go, "the first worker is in its second epoch")
        cluster.start(script)
        cluster.join()
        found = cluster.outcome()
    assert found.digests[0] == train(script_loading(-1, **what), 1, 1, slices_per_step=2).digests[0]


def test_a_worker_that_dies_is_not_waited_for() -> None:
    what = saved()

    def script(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.prepare(*(lambda model: (model, adamw(model.parameters())))(Aligned()))
            raise Died
        script_loading(-1, **what)(ctx)

    with Cluster(2, 1, slices_per_step=2, lease_s=0.5, grace_s=0.1) as cluster:
        cluster.train(script)
        found = cluster.outcome()
    assert found.digests[0] == train(script_loading(-1, **what), 1, 1, slices_per_step=2).digests[0]


STRIKES = {
    "a server, with the checkpoint before it": [Strike("ckpt.mid_write", "server-1", 2)],
    "a server, with the checkpoint of what was loaded": [Strike("ckpt.mid_write", "server-1", 2, nth=2)],
    "a server, after it": [Strike("commit.before_log", "server-1", 3)],
    "the coordinator, with the checkpoint of what was loaded": [Strike("ckpt.manifest", "leader", 2, nth=1)],
    "a server and the coordinator": [Strike("ckpt.mid_write", "server-0", 2, nth=2, also=("leader",))],
}


@pytest.mark.long
@pytest.mark.parametrize("what_dies", STRIKES)
def test_whoever_dies_meanwhile_the_bits_are_the_same(what_dies: str, tmp_path: Path) -> None:
    script = script_loading(1, **saved())
    with Rig(tmp_path, 2, STRIKES[what_dies], workers=2, servers=2) as rig:
        rig.begin(script)
        summary = rig.finish()
    same(summary, train(script, 1, 1, slices_per_step=4).summary)


@pytest.mark.parametrize("at", [-1, 1])
def test_a_job_that_is_resumed_has_what_was_loaded_before(at: int, tmp_path: Path) -> None:
    """Its script runs from the top, and passes a load that is done: the bits are those of one run."""
    what = saved()
    with Rig(tmp_path, 2, workers=1) as rig:
        rig.begin(script_loading(at, 2, **what))
        rig.finish()
    with Rig(tmp_path, 2, workers=1, checkpoint__resume=str(tmp_path / "ckpt")) as rig:
        rig.begin(script_loading(at, 3, **what))
        summary = rig.finish()
        assert rig.orders.begun_with() == 4
    same(summary, train(script_loading(at, 3, **what), 1, 1, slices_per_step=4).summary)
