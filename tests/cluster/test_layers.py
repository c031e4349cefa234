"""Layers and habits of models, each compared with plain torch, or with DDP on two processes, on the same data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.checkpoint.catalog import newest
from paramserver.checkpoint.export import export
from paramserver.checkpoint.place import Place
from paramserver.core.layout.plan import Kind
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Outcome, train, until
from tests.support.cluster.programs import Aligned, Program, adamw, dataset
from tests.support.cluster.reference import slice_by_slice, slices_of_steps
from tests.support.failover.rollback import Rig
from tests.support.layers import Adapted, Branching, Checkpointed, Pictures, adapters

SAMPLES, BATCH, SLICES, EPOCHS = 48, 8, 2, 3


def compare(build: Callable[[], nn.Module], optimizer: Any = adamw, exact: bool = True) -> Outcome:
    """One and two workers have the same bits; these are plain torch's (``exact``), or close to them."""
    data = dataset(SAMPLES)
    program = Program(data, BATCH, EPOCHS, build, optimizer)
    outcomes = [train(program, workers, servers, slices_per_step=SLICES) for workers, servers in ((1, 1), (2, 2))]
    assert outcomes[0].digests == outcomes[1].digests
    model = build()
    plain = optimizer(model.parameters(), fused=True)
    slice_by_slice(model, plain, slices_of_steps(data, BATCH, SLICES, EPOCHS), F.cross_entropy)
    for name, parameter in model.named_parameters():
        found = outcomes[0].tensor(name)
        if exact:
            assert torch.equal(found, parameter.detach()), name
        else:
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-4, atol=1e-5)
    return outcomes[1]


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing(reentrant: bool) -> None:
    made: list[Checkpointed] = []

    def build() -> nn.Module:
        made.append(Checkpointed(reentrant))
        return made[-1]

    compare(build)
    assert made[0].calls == 2 * EPOCHS * SAMPLES // BATCH, "each slice computes the layer twice"


def test_control_flow_that_differs_between_slices() -> None:
    made: list[Branching] = []

    def build() -> nn.Module:
        made.append(Branching())
        return made[-1]

    compare(build)
    assert made[0].ways == {True, False}


def test_channels_last() -> None:
    outcome = compare(lambda: Pictures(torch.channels_last), exact=False)
    plain = train(
        Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: Pictures(torch.contiguous_format), adamw),
        1,
        1,
        slices_per_step=SLICES,
    )
    for name, _ in Pictures(torch.channels_last).named_parameters():
        torch.testing.assert_close(outcome.tensor(name), plain.tensor(name), rtol=1e-4, atol=1e-5)


def test_quantised_base_layers_with_adapters() -> None:
    """Only adapters are trained and travel in each step; the base keeps its bytes."""
    outcome = compare(Adapted, adapters)
    kinds = {spec.name: spec.kind for spec in outcome.result.layout.tensors}
    assert {name for name, kind in kinds.items() if kind is Kind.PARAMETER} == {"down.weight", "up.weight"}
    assert kinds["head.weight"] is Kind.FROZEN
    start = Adapted()
    assert torch.equal(outcome.tensor("base.weight"), start.base.weight.double())
    assert torch.equal(outcome.tensor("head.weight"), start.head.weight)


def test_a_compiled_model() -> None:
    """The graph is captured and run without a compiler. Its bits are those of plain torch."""
    captured: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return graph.forward

    def build() -> nn.Module:
        torch._dynamo.reset()
        compiled: Any = torch.compile(Aligned(), backend=backend)
        return compiled  # type: ignore[no-any-return]

    data = dataset(SAMPLES)
    outcome = train(Program(data, BATCH, EPOCHS, build, adamw), 1, 2, slices_per_step=SLICES)
    plain = train(Program(data, BATCH, EPOCHS, Aligned, adamw), 1, 2, slices_per_step=SLICES)
    assert captured
    for name, _ in Aligned().named_parameters():
        assert torch.equal(outcome.tensor(f"_orig_mod.{name}"), plain.tensor(name)), name


def test_results_of_a_compiled_model_have_the_names_of_the_model_inside(tmp_path: Path) -> None:
    plain = Aligned().state_dict()

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        compiled: Any = torch.compile(model, backend="eager")
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        compiled, optimizer, loader = ctx.prepare(compiled, adamw(model.parameters()), loader)
        ctx.load(ctx.state_dict())
        ctx.load(model=compiled.state_dict())
        ctx.load(model=model.state_dict())
        found = ctx.state_dict()["model"]
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], value) for name, value in plain.items())
        for _ in ctx.epochs(1):
            for x, y in loader:
                F.cross_entropy(compiled(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

    with Rig(tmp_path, 1) as rig:
        rig.begin(script)
        rig.finish()
    place = Place(str(tmp_path / "ckpt"))
    manifest = newest(place)
    assert manifest is not None
    for kind, name in (("torch", "out.pt"), ("safetensors", "out.safetensors")):
        export(place, manifest, kind, tmp_path / name)
    exported = torch.load(tmp_path / "out.pt")
    assert exported["model"].keys() == load_file(tmp_path / "out.safetensors").keys() == plain.keys()
    assert set(exported["optimizer_names"]) == plain.keys()


@pytest.mark.parametrize("same", [True, False], ids=["same base", "another base"])
def test_only_what_is_trained_travels(same: bool) -> None:
    """Servers never see frozen parameters. Their bits are compared, and the result is that of plain torch."""
    data, saved = dataset(SAMPLES), list[dict[str, Any]]()

    def script(ctx: Context) -> None:
        model: Any = Adapted()
        if ctx.rank and not same:
            model.head.bias.data[0] += 1e-3
        optimizer: Any = adapters(model.parameters())
        loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, only_trained=True)
        ctx.load(ctx.state_dict())
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        saved.append(ctx.state_dict()["model"])

    if not same:
        with Cluster(2, 1, slices_per_step=SLICES) as cluster:
            workers = [cluster.start(script) for _ in range(2)]
            until("one of them is refused", lambda: any(worker.error is not None for worker in workers))
        (refused,) = [worker.error for worker in workers if isinstance(worker.error, errors.ModelError)]
        assert "frozen parameters are not those of the first worker" in str(refused)
        return
    outcome = train(script, 2, 2, slices_per_step=SLICES)
    names = {spec.name for spec in outcome.result.layout.tensors}
    assert names == {"base.weight", "base.scale", "down.weight", "up.weight"}
    model = Adapted()
    plain = adapters(model.parameters(), fused=True)
    slice_by_slice(model, plain, slices_of_steps(data, BATCH, SLICES, EPOCHS), F.cross_entropy)
    for name, value in model.state_dict().items():
        assert torch.equal(saved[0][name], value), name
