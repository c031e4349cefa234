"""Several models in one job: what plain torch does with them, and the same bits with any number of processes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paramserver import errors
from paramserver.v1 import types_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Outcome, inside, train, wait
from tests.support.cluster.programs import dataset
from tests.support.failover.rollback import Rig, same
from tests.support.turns.adversaries import (
    EPOCHS,
    Adversaries,
    data_of,
    different_optimizers,
    models,
    optimizers,
    with_plain_torch,
)

SLICES = 2


def states_agree(found: dict[str, Any], model: Any, optimizer: Any) -> None:
    """The state of one model, as `ctx.state_dict` gives it, is that of plain torch within rounding."""
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-5, atol=1e-6)
    state = optimizer.state_dict()
    assert found["optimizer"]["state"].keys() == state["state"].keys()
    for number, one in state["state"].items():
        for key, value in one.items():
            torch.testing.assert_close(found["optimizer"]["state"][number][key], value, rtol=1e-4, atol=1e-6)
    rates = [[group["lr"] for group in one["param_groups"]] for one in (found["optimizer"], state)]
    assert rates[0] == rates[1]


def differs(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether weights or optimizer state of a model are other ones."""
    weights = any(not torch.equal(value, other["model"][key]) for key, value in one["model"].items())
    return weights or str(one["optimizer"]["state"]) != str(other["optimizer"]["state"])


def run(workers: int, servers: int, script: Adversaries, **settings: Any) -> Outcome:
    """A whole job of this script."""
    return train(script, workers, servers, slices_per_step=SLICES, **settings)


@pytest.mark.parametrize("turns", [1, 3])
def test_two_models_that_step_in_turn_are_those_of_plain_torch(turns: int) -> None:
    script = Adversaries(turns=turns, norm=False)
    run(2, 2, script)
    forger, critic, of_forger, of_critic = with_plain_torch(script.samples, turns, SLICES)
    for state in script.states:
        states_agree(state["forger"], forger, of_forger)
        states_agree(state["critic"], critic, of_critic)


def test_models_with_optimizers_of_different_classes_are_those_of_plain_torch() -> None:
    script = Adversaries(turns=2, norm=False, make=different_optimizers)
    digests_of_two = run(2, 2, script).digests
    forger, critic, of_forger, of_critic = with_plain_torch(script.samples, 2, SLICES, make=different_optimizers)
    for state in script.states:
        states_agree(state["forger"], forger, of_forger)
        states_agree(state["critic"], critic, of_critic)
    assert run(1, 3, Adversaries(turns=2, norm=False, make=different_optimizers)).digests == digests_of_two


@cache
def digests(turns: int) -> tuple[str, str, str]:
    """Of a job with two workers and two servers."""
    return run(2, 2, Adversaries(turns=turns)).digests


@pytest.mark.parametrize(("workers", "servers", "turns"), [(1, 1, 1), (3, 1, 1), (1, 3, 2)])
def test_the_bits_do_not_depend_on_the_number_of_workers_and_servers(workers: int, servers: int, turns: int) -> None:
    assert run(workers, servers, Adversaries(turns=turns)).digests == digests(turns)


def test_a_worker_that_dies_between_two_turns_changes_no_bit() -> None:
    steps: Counter[str] = Counter()
    died: list[str] = []

    def each(ctx: Context, name: str) -> None:
        steps[name] += 1
        if ctx.rank == 1 and steps["critic"] > 4 and name == "critic" and not died:
            died.append(name)
            raise Died

    assert run(2, 2, Adversaries(each=each)).digests == digests(1)
    assert died == ["critic"]


def test_each_turn_counts_once_in_asynchronous_mode() -> None:
    script = Adversaries(turns=2)
    with Cluster(2, 2, mode="async", staleness=2) as cluster:
        outcome = cluster.train(script)
    data, _ = data_of(script.samples, script.turns)
    assert data.slices_per_epoch == 30
    assert outcome.result.version == EPOCHS * data.slices_per_epoch


def test_a_turn_changes_only_its_model() -> None:
    seen: list[tuple[str, bool, bool]] = []
    before: dict[str, Any] = {}

    def each(ctx: Context, name: str) -> None:
        now = ctx.state_dict()
        if before:
            seen.append((name, differs(now["critic"], before["critic"]), differs(now["forger"], before["forger"])))
        before.update(now)

    train(Adversaries(norm=False, samples=12, each=each), 1, 1)
    assert set(seen) == {("critic", True, False), ("forger", False, True)}


def test_what_is_loaded_by_name_is_what_a_job_goes_on_from() -> None:
    saved = Adversaries(samples=12)
    run(1, 1, saved)
    (state,) = saved.states
    loaded: list[dict[str, Any]] = []

    def script(ctx: Context) -> None:
        one, other = models()
        of_one, of_other = optimizers(one, other)
        x, _ = dataset(12).tensors
        ctx.prepare(other, of_other, name="critic")
        ctx.prepare(one, of_one, DataLoader(TensorDataset(x), batch_size=4), name="forger")
        ctx.load(state)
        loaded.append(ctx.state_dict())

    train(script, 1, 2)
    for name in ("critic", "forger"):
        assert loaded[0][name]["model"].keys() == state[name]["model"].keys()
        assert all(torch.equal(value, state[name]["model"][key]) for key, value in loaded[0][name]["model"].items())
        assert str(loaded[0][name]["optimizer"]["state"]) == str(state[name]["optimizer"]["state"])


def _name_twice(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    ctx.prepare(forger, of_forger, name="one")
    ctx.prepare(critic, of_critic, name="one")


def _late(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    ctx.prepare(forger, of_forger, loader, name="forger")
    ctx.prepare(critic, of_critic, name="critic")


def _mixed(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    ctx.prepare(forger, of_forger, name="forger")
    of_critic.add_param_group({"params": list(forger.parameters())})
    ctx.prepare(critic, of_critic, name="critic")


def _before_the_loader(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    _, of_forger = ctx.prepare(forger, of_forger, name="forger")
    of_forger.step()


def _out_of_turn(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    critic, of_critic = ctx.prepare(critic, of_critic, name="critic")
    forger, of_forger, loader = ctx.prepare(forger, of_forger, loader, name="forger")
    for _ in loader:
        of_forger.step()


def _too_often(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    critic, of_critic = ctx.prepare(critic, of_critic, name="critic")
    forger, of_forger, loader = ctx.prepare(forger, of_forger, loader, name="forger")
    for _ in loader:
        of_critic.step()
        of_critic.step()


def _leaves_a_step_out(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    """The forger steps on every second batch, so which steps there are would depend on the number of workers."""
    critic, of_critic = ctx.prepare(critic, of_critic, name="critic")
    forger, of_forger, loader = ctx.prepare(forger, of_forger, loader, name="forger")
    for number, _ in enumerate(loader):
        of_critic.step()
        if number % 2 == 0:
            of_forger.step()


def _no_turns(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    ctx.prepare(forger, of_forger, name="forger", turns=0)


def _accumulates(ctx: Context, forger: Any, critic: Any, of_forger: Any, of_critic: Any, loader: Any) -> None:
    ctx.prepare(forger, of_forger, loader, name="forger", turns=2, accumulate=2)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (_name_twice, "a model called 'one' is prepared already"),
        (_late, "prepare every model before the loader"),
        (_mixed, "give each model an optimizer of its own parameters only"),
        (_before_the_loader, "give the loader to ctx.prepare before the first optimizer.step"),
        (_out_of_turn, "steps where it is the turn of 'critic'"),
        (_too_often, "steps where it is the turn of 'forger'"),
        (
            _leaves_a_step_out,
            r"where the optimizer of 'forger' is to step: .* all of them or none",
        ),
        (_no_turns, "at least 1, not 0"),
        (_accumulates, "do not go with accumulate"),
    ],
)
def test_wrong_use_is_refused_in_a_sentence(script: Callable[..., None], words: str) -> None:
    def work(ctx: Context) -> None:
        forger, critic = models()
        x, _ = dataset(12).tensors
        loader = DataLoader(TensorDataset(x), batch_size=4)
        with pytest.raises(errors.ParamServerError, match=words):
            script(ctx, forger, critic, *optimizers(forger, critic), loader)

    inside(work)


def takes_a_group_out(optimizer: Any) -> None:
    del optimizer.param_groups[0]


def takes_a_parameter_out(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize("change", [takes_a_group_out, takes_a_parameter_out])
@pytest.mark.parametrize("of", ["forger", "critic"])
def test_groups_that_are_taken_out_of_an_optimizer_are_noticed(change: Callable[[Any], None], of: str) -> None:
    def work(ctx: Context) -> None:
        forger: Any
        critic: Any
        forger, critic = models()
        of_forger, of_critic = optimizers(forger, critic)
        loader = DataLoader(TensorDataset(dataset(12).tensors[0]), batch_size=4)
        forger, of_forger = ctx.prepare(forger, of_forger, name="forger")
        critic, of_critic, loader = ctx.prepare(critic, of_critic, loader, name="critic")
        change(of_forger if of == "forger" else of_critic)
        for (real,) in loader:
            forger(torch.zeros(len(real), 5)).sum().backward()
            of_forger.step()
            critic(real).sum().backward()
            of_critic.step()

    with pytest.raises(errors.ModelError, match=r"optimizer.param_groups has other groups or other parameters"):
        inside(work)


@pytest.mark.parametrize("version", [4, 7])
def test_a_server_dies_between_two_turns(tmp_path: Path, version: int) -> None:
    """The job goes back to a checkpoint, of which some lie between two turns on a batch."""
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context, name: str) -> None:
        if ctx.version == version and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    with Rig(tmp_path, 3, training__slices_per_step=SLICES) as rig:
        rig.begin(Adversaries(each=stop))
        wait(reached, "a place between two turns", 60.0)
        rig.kill_now("server-1")
        go.set()
        summary = rig.finish()
        assert rig.rollbacks == 1
    same(summary, train(Adversaries(), 1, 1, slices_per_step=SLICES).summary)


def test_turns_of_a_slow_worker_go_to_others() -> None:
    """The other worker goes through the body of the loop for them."""
    taken: Counter[int] = Counter()

    def slow(ctx: Context, name: str) -> None:
        time.sleep(0.04 if ctx.rank else 0.002)
        if ctx.prepared.steps is not None and ctx.prepared.steps.item is not None:
            taken[ctx.rank] += ctx.prepared.steps.item.unplanned

    outcome = train(Adversaries(80, each=slow), 2, 2, slices_per_step=5)
    assert taken[0] > 0, f"turns that were taken over: {taken}"
    assert outcome.digests == train(Adversaries(80), 1, 1, slices_per_step=5).digests


def test_each_turn_counts_once_across_changes_of_the_mode() -> None:
    """Also those of batches of which a mode has made some turns, and the next mode the others."""
    script = Adversaries(samples=200, turns=2, norm=False)
    data, _ = data_of(script.samples, script.turns)
    reached = [threading.Event(), threading.Event()]
    go = [threading.Event(), threading.Event()]

    def stop(ctx: Context, name: str) -> None:
        for number, version in enumerate((7, 100)):
            if ctx.version >= version and not go[number].is_set():
                reached[number].set()
                wait(go[number], "the word to go on", 60.0)

    script.each = stop
    with Cluster(2, 2, slices_per_step=SLICES) as cluster:
        workers = [cluster.start(script) for _ in range(2)]
        for number, mode in enumerate(("async", "sync")):
            wait(reached[number], f"a place for the change to {mode}", 60.0)
            go[number].set()
            reply = cluster.set_consistency(mode, 2)
            assert reply.consistency.mode == (types_pb2.MODE_ASYNC if mode == "async" else types_pb2.MODE_SYNC)
        cluster.join(workers)
        applied = [server.applied for server in cluster.stats()]
    assert applied == [EPOCHS * data.slices_per_epoch] * 2
