"""`ctx.register`: the state of objects travels in checkpoints, and comes back with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.coordinator.work import registered
from paramserver.worker.context import Context
from paramserver.worker.registered import objects
from paramserver.worker.registered.states import packed, unpacked
from tests.support.cluster.harness import Cluster, inside, until, wait
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.failover.rollback import Rig

# Four slices in an epoch, two of them in a step.
SAMPLES, BATCH, SLICES, EPOCHS = 32, 8, 2, 4


class Curriculum:
    """Counts versions and epochs, in values of several types."""

    def __init__(self) -> None:
        self.versions, self.epochs, self.notes = 0, 0, [("begin", 0.5)]

    def state_dict(self) -> dict[str, Any]:
        return {"versions": self.versions, "notes": self.notes, "by": {0: None, "epochs": self.epochs, "on": True}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.versions, self.notes, self.epochs = state["versions"], state["notes"], state["by"]["epochs"]


class Script:
    """Trains with averaged weights, a scaler and a curriculum; notes their states at the end."""

    def __init__(self, each: Callable[[Context], object] | None = None) -> None:
        self.each = each
        self.found: dict[int, dict[str, Any]] = {}

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        curriculum, scaler = Curriculum(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        things: dict[str, Any] = {"curriculum": curriculum, "mean": mean}
        for name, thing in things.items():
            ctx.register(name, thing)
        assert ctx.prepare(scaler) is scaler
        things["scaler"] = scaler
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                if self.each is not None:
                    self.each(ctx)
                before = ctx.version
                scaler.step(optimizer)
                optimizer.zero_grad()
                if ctx.version > before:
                    scaler.update()
                    mean.update_parameters(model)
                    curriculum.versions += 1
                    curriculum.notes.append(("version", float(ctx.version)))
                else:
                    scaler.update(scaler.get_scale())
            curriculum.epochs += 1
        self.found[ctx.rank] = unpacked(packed({name: thing.state_dict() for name, thing in things.items()}))


def assert_same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    else:
        assert one == other, where


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    script = Script()
    with Cluster(1, 1, slices_per_step=SLICES) as cluster:
        cluster.train(script)
    return script.found[0]


def test_the_states_of_an_undisturbed_run(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["curriculum"]["versions"] == 8
    assert undisturbed["curriculum"]["by"] == {0: None, "epochs": 4, "on": True}
    assert undisturbed["scaler"]["scale"] == 16.0
    assert undisturbed["mean"]["n_averaged"].item() == 8


@pytest.mark.parametrize("version", [5, pytest.param(4, marks=pytest.mark.long)])
def test_after_going_back(version: int, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """A server is killed in step 5 (in the middle of an epoch) or 4; the job goes back to version 3."""
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version == version and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    script = Script(stop)
    with Rig(tmp_path, 3, training__slices_per_step=SLICES) as rig:
        rig.begin(script)
        wait(reached, "the step", 60.0)
        rig.goes_back()
        go.set()
        rig.finish()
    for found in script.found.values():
        assert_same(found, undisturbed)
    assert script.found


def test_after_going_back_to_version_0(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """Objects get the state with which they were registered."""
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version == 2 and not go.is_set():
            reached.set()
            wait(go, "the word to go on", 60.0)

    script = Script(stop)
    with Rig(tmp_path, 3, training__slices_per_step=SLICES) as rig:
        rig.begin(script)
        wait(reached, "step 2", 60.0)
        rig.goes_back()
        go.set()
        rig.finish()
    for found in script.found.values():
        assert_same(found, undisturbed)


def test_a_job_that_is_resumed(undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes end in step 5, and the job goes on from the checkpoint of version 3. States travel in pieces."""
    monkeypatch.setattr(registered, "PIECE_BYTES", 1000)
    monkeypatch.setattr(objects, "_PIECE_BYTES", 700)
    reached, go = threading.Event(), threading.Event()

    def stop(ctx: Context) -> None:
        if ctx.version == 5:
            reached.set()
            wait(go, "the end", 60.0)

    with Rig(tmp_path, 3, training__slices_per_step=SLICES) as rig:
        rig.begin(Script(stop))
        wait(reached, "step 5", 60.0)
        until("the checkpoint is complete", lambda: [*tmp_path.glob("ckpt/step-00000003-*/MANIFEST.json")])
        for server in list(rig.keepers):
            rig.call(server.die)
        rig.ending = True
        go.set()
    assert [*tmp_path.glob("ckpt/step-00000003-*/registered.safetensors")]
    script = Script()
    again: dict[str, Any] = {"checkpoint__resume": str(tmp_path / "ckpt"), "training__slices_per_step": SLICES}
    with Rig(tmp_path, 3, workers=1, **again) as rig:
        rig.begin(script)
        rig.finish()
    assert_same(script.found[0], undisturbed)


def test_a_worker_that_comes_late_has_the_newest_known_state() -> None:
    come = threading.Event()
    seen: list[int] = []

    class Count:
        value = 7

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]
            seen.append(self.value)

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        count = Count()
        count.value += ctx.rank
        ctx.register("count", count)
        for _ in ctx.epochs(2):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                if ctx.rank == 0 and ctx.version == 2:
                    come.set()
                    until("the other worker has come", lambda: seen)
                optimizer.step()
                optimizer.zero_grad()

    with Cluster(1, 1, slices_per_step=SLICES) as cluster:
        cluster.start(script)
        wait(come, "step 2")
        cluster.start(script)
        cluster.join()
    assert seen == [7]


def test_refused() -> None:
    class Holder:
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    def work(ctx: Context) -> None:
        with pytest.raises(errors.UserError, match="belongs after"):
            ctx.register("it", Holder({}))
        model: Any = network()
        ctx.prepare(model, sgd(model.parameters()))
        for state, where in (
            ({"a": [1, {2}]}, r"cannot keep it\.a\.1, a set"),
            (lambda: 0, "cannot keep it, a function"),
            ({(1, 2): 3}, "whose keys are texts or whole numbers, not it"),
            ({"a": torch.ones(2, dtype=torch.complex64)}, "it.a is torch.complex64"),
        ):
            with pytest.raises(errors.UserError, match=where):
                ctx.register("it", Holder(state))
        ctx.register("it", Holder({"a": 1}))
        with pytest.raises(errors.UserError, match="has an object 'it' already"):
            ctx.register("it", Holder({}))
        with pytest.raises(errors.UserError, match="not int"):
            ctx.register("number", 3)
        with pytest.raises(errors.UserError, match="printable characters"):
            ctx.register("", Holder({}))

    inside(work)


def test_bytes_that_make_no_sense() -> None:
    good = packed({"a": {"x": torch.arange(3), "y": [1, (2.5, None)]}})
    assert_same(unpacked(good), {"a": {"x": torch.arange(3), "y": [1, (2.5, None)]}})
    for number in range(len(good)):
        try:
            unpacked(good[:number])
        except errors.CheckpointError:
            continue
        pytest.fail(f"{number} bytes were taken")
