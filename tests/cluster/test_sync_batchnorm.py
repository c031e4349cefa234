"""`nn.SyncBatchNorm` over the slices of a step: the numbers of BatchNorm over the step, with the same bits always."""

from __future__ import annotations

import copy
import io
import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Outcome, alone, train, until, wait
from tests.support.cluster.programs import CLASSES, FEATURES, Program, dataset, fill, sgd
from tests.support.cluster.reference import slices_of_steps, whole_batches
from tests.support.failover.rollback import CHUNK, Rig, same

# 5 slices: of the last step of an epoch of 2 slices a step, one slice is left, and it has 3 samples.
SAMPLES, BATCH, EPOCHS = 35, 8, 2
ON: dict[str, Any] = {"training__sync_batchnorm": True}


class Moment:
    """Something happens once, in the middle of a forward pass of a worker, while another worker waits there for it."""

    def __init__(self, thread: str, nth: int, act: Callable[[], object]) -> None:
        self.thread, self.nth, self.act = thread, nth, act
        self.passes = 0
        self.over = threading.Event()

    def __call__(self) -> None:
        if threading.current_thread().name != self.thread or self.over.is_set():
            return
        self.passes += 1
        if self.passes == self.nth:
            self.over.set()
            self.act()


def waits(ctx: Context | None) -> bool:
    """Whether this worker waits for other slices of its step."""
    return ctx is not None and "step" in ctx.engine.member.waiting_for


class Net(nn.Module):
    """Two layers of BatchNorm, one of them in the middle of a convolution, one called twice, one without weights."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 12)
        self.norm = nn.BatchNorm1d(12)
        self.conv = nn.Conv1d(3, 5, 3)
        self.bare = nn.BatchNorm1d(5, momentum=None, affine=False)
        self.last = nn.Linear(10, CLASSES)
        fill(self).to(dtype)
        self.moment: Callable[[], object] = int

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.norm(self.first(x)))
        self.moment()
        h = torch.tanh(self.norm(h * h - h))
        return self.last(torch.relu(self.bare(self.conv(h.view(-1, 3, 4)))).flatten(1))


def synced(dtype: torch.dtype = torch.float64, moment: Callable[[], object] = int) -> nn.Module:
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    found: Any = convert(Net(dtype))
    found.moment = moment
    return found  # type: ignore[no-any-return]


def program(dtype: torch.dtype = torch.float64, moment: Callable[[], object] = int) -> Program:
    return Program(dataset(SAMPLES, dtype), BATCH, EPOCHS, lambda: synced(dtype, moment), sgd)


def trained(workers: int, servers: int, slices: int, dtype: torch.dtype = torch.float64, **options: Any) -> Outcome:
    return train(program(dtype), workers, servers, ON, slices_per_step=slices, **options)


@cache
def quiet(slices: int) -> tuple[str, str, str]:
    return trained(slices, 1, slices).digests


@cache
def whole(slices: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What one process with plain BatchNorm comes to, with the batches of all slices of a step as one batch."""
    model = Net(dtype)
    whole_batches(
        model, sgd(model.parameters()), slices_of_steps(dataset(SAMPLES, dtype), BATCH, slices, EPOCHS), F.cross_entropy
    )
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=str)
def test_the_numbers_are_those_of_batch_norm_over_the_whole_step(slices: int, dtype: torch.dtype, bound: float) -> None:
    outcome = trained(slices, 2, slices, dtype)
    for name, value in whole(slices, dtype).items():
        torch.testing.assert_close(outcome.tensor(name).to(value.dtype), value, rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 2)])
def test_the_bits_do_not_depend_on_who_computes_the_slices(workers: int, servers: int) -> None:
    assert trained(workers, servers, 3).digests == quiet(3)


def test_one_slice_in_a_step_is_plain_batch_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a script without a cluster."""
    plain = Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: Net(torch.float32), sgd)
    wanted = train(plain).digests
    assert train(program(torch.float32), settings=ON).digests == wanted
    summary = alone(program(torch.float32), tmp_path, monkeypatch, **ON)
    assert (summary["weights_sha256"], summary["buffers_sha256"]) == (wanted[0], wanted[2])


def test_gradient_accumulation() -> None:
    """Each batch of a slice is normalised with the batches of the other slices that have its number."""

    def script(ctx: Context) -> None:
        model: Any = synced()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(32, torch.float64), batch_size=4, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, accumulate=2)
        for _ in range(2):
            for x, y in loader:
                (F.cross_entropy(model(x), y) / 2).backward()  # type: ignore[no-untyped-call]
                if ctx.step_due:
                    optimizer.step()
                    optimizer.zero_grad()

    assert train(script, 2, 1, ON, slices_per_step=2).digests == train(script, 1, 2, ON, slices_per_step=2).digests


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_halves_and_pictures(layout: torch.memory_format) -> None:
    """A layer for pictures, in bfloat16, has BatchNorm's numbers for both slices together, in its type and layout."""
    pictures = torch.randn(2, 6, 4, 5, 5, generator=torch.Generator().manual_seed(1)).bfloat16() * 3 + 7
    plain = nn.BatchNorm2d(4)
    expected = plain(pictures.flatten(0, 1)).view(2, 6, 4, 5, 5)
    found: dict[int, Tensor] = {}

    def script(ctx: Context) -> None:
        model = nn.SyncBatchNorm(4)
        model, optimizer, loader = ctx.prepare(model, sgd(model.parameters()), DataLoader(TensorDataset(pictures)))
        for (x,) in loader:
            out = model(x[0].contiguous(memory_format=layout))
            assert out.dtype is torch.bfloat16
            assert out.is_contiguous(memory_format=layout)
            found[int((x[0] == pictures[1]).all())] = out.detach()
            out.float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    outcome = train(script, 2, 1, ON, slices_per_step=2)
    for number, out in found.items():
        torch.testing.assert_close(out, expected[number], rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(outcome.tensor("running_var"), plain.running_var, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outcome.tensor("running_mean"), plain.running_mean, rtol=1e-5, atol=1e-5)
    assert len(found) == 2


def test_evaluation_and_copies_of_the_model_ask_nobody() -> None:
    """A worker evaluates while the other one does not, and a copy has the statistics of its own."""

    def script(ctx: Context) -> None:
        model: Any = synced()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(16, torch.float64), batch_size=4)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for number, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if ctx.rank == 0 or number:
                model.eval()
                twin = copy.deepcopy(model)
                with torch.no_grad():
                    assert torch.equal(twin(x), model(x))
                    twin.norm.running_mean += 1.0
                    assert not torch.equal(twin(x), model(x))
                model.train()
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False).eval()
        assert torch.equal(loaded(x), model.eval()(x))

    train(script, 2, 1, ON, slices_per_step=2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_model() -> None:
    """The layer stays outside of the captured graphs. (torch itself warns where a graph ends before a layer.)"""

    def build() -> nn.Module:
        torch._dynamo.reset()
        compiled: Any = torch.compile(synced(), backend="eager")
        return compiled  # type: ignore[no-any-return]

    compiled = Program(dataset(SAMPLES, torch.float64), BATCH, EPOCHS, build, sgd)
    outcome = train(compiled, 1, 1, ON, slices_per_step=2)
    for name, value in whole(2, torch.float64).items():
        found = outcome.tensor(f"_orig_mod.{name}").to(value.dtype)
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-10, msg=name)


# ---- faults


@pytest.mark.parametrize("again", [True, False], ids=["another worker comes", "nobody comes"])
def test_a_worker_dies_while_another_one_waits_for_it_in_its_forward_pass(again: bool) -> None:
    """The newcomer, or the one that is left, computes the slice again, and gets the sums that there were."""

    def die() -> None:
        until("worker-0 waits", lambda: waits(cluster.workers[0].context))
        raise Died

    death = Moment("worker-1", 4, die)
    with Cluster(2, 2, slices_per_step=2, grace_s=0.1, sync_batchnorm=True) as cluster:
        for _ in range(2):
            cluster.start(program(moment=death), ON)
        wait(death.over, "the death of worker-1")
        if again:
            cluster.start(program(), ON)
        cluster.join()
        outcome = cluster.outcome()
    assert outcome.digests == quiet(2)


def test_a_worker_hangs_in_its_forward_pass_and_comes_back_when_the_step_is_over() -> None:
    """Meanwhile the other worker has computed its slices; their rounds are forgotten."""

    def hang() -> None:
        ctx = cluster.workers[0].context
        assert ctx is not None
        version = ctx.version
        until("worker-0 goes on alone", lambda: ctx.version > version + 1)

    moment = Moment("worker-1", 4, hang)
    with Cluster(2, 1, slices_per_step=2, stall_s=0.5, sync_batchnorm=True) as cluster:
        for _ in range(2):
            cluster.start(program(moment=moment), ON)
        cluster.join()
        outcome = cluster.outcome()
    assert moment.over.is_set()
    assert outcome.digests == quiet(2)


@cache
def undisturbed() -> Any:
    return train(program(), 2, 1, {**ON, "training__chunk_bytes": CHUNK}, slices_per_step=2).summary


@pytest.mark.parametrize(
    ("server", "replicas", "dies"),
    [
        pytest.param(0, 0, False, id="back"),
        pytest.param(1, 0, False, id="other server, back", marks=pytest.mark.long),
        pytest.param(0, 1, False, id="backup", marks=pytest.mark.long),
        pytest.param(0, 1, True, id="backup, worker dies, too"),
        pytest.param(1, 1, True, id="other server, backup, worker dies, too", marks=pytest.mark.long),
    ],
)
def test_a_server_dies_while_a_worker_waits_in_its_forward_pass(
    server: int, replicas: int, dies: bool, tmp_path: Path
) -> None:
    """Without backups all go back to a checkpoint. With one, workers bring again what the server had of this step."""

    def strike() -> None:
        until("worker-0 waits", lambda: waits(rig.hands[0].context))
        rig.kill_now(f"server-{server}")
        if dies:
            raise Died

    moment = Moment("worker-1", 4, strike)
    options: dict[str, Any] = {"cluster__replicas": replicas, "training__sync_batchnorm": True}
    with Rig(tmp_path, 2 if not replicas else 0, slices_per_step=2, **options) as rig:
        rig.begin(program(moment=moment))
        wait(moment.over, "the death of a server")
        if dies:
            rig.work(program())
        summary = rig.finish()
        assert rig.deaths == [f"server-{server}"]
        assert (rig.rollbacks > 0) == (not replicas)
    same(summary, undisturbed())


def test_a_slice_that_does_not_come_is_named() -> None:
    """The error names the layer, the slice and its worker; so does the status meanwhile."""
    released = threading.Event()

    def stay() -> None:
        until("worker-0 waits", lambda: waits(cluster.workers[0].context))
        wait(released, "the end of the test")

    with Cluster(2, 1, slices_per_step=2, wait_timeout_s=3.0, sync_batchnorm=True) as cluster:
        for _ in range(2):
            cluster.start(program(moment=Moment("worker-1", 4, stay)), ON)
        until("it gives up", lambda: cluster.workers[0].error is not None)
        released.set()
    told = str(cluster.workers[0].error)
    assert re.fullmatch(
        r"the statistics of SyncBatchNorm 'norm' in step (\d+): waited 3 s for slice [01] of step \1 \(worker-1\): "
        "look there for an error, or for a layer that not every slice calls",
        told,
    )


# ---- refusals


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(dataset(16))

    def __len__(self) -> int:
        return 16


def prepared(ctx: Context, data: Dataset[Any], **options: Any) -> tuple[Any, Any, Any]:
    model = synced(torch.float32)
    found: tuple[Any, Any, Any] = ctx.prepare(model, sgd(model.parameters()), DataLoader(data, batch_size=4), **options)
    return found


def refused(match: str, work: Callable[[Context], object], **settings: Any) -> None:
    with Cluster(slices_per_step=2) as cluster:
        ctx = cluster.context(0, **settings)
        try:
            with pytest.raises(errors.UserError, match=match):
                work(ctx)
        finally:
            ctx.close()


def test_it_has_to_be_asked_for() -> None:
    match = r"^SyncBatchNorm 'norm' takes statistics .* with training.sync_batchnorm = true, or use BatchNorm"
    refused(match, lambda ctx: prepared(ctx, dataset(16)))


def test_a_process_group_of_its_own_is_refused() -> None:
    def work(ctx: Context) -> None:
        model: Any = nn.SyncBatchNorm(4)
        model.process_group = object()
        ctx.prepare(model, sgd(model.parameters()), DataLoader(dataset(16)))

    refused("SyncBatchNorm has a process group of its own, .*: leave process_group out", work, **ON)


def test_several_models_are_refused() -> None:
    def work(ctx: Context) -> None:
        model = synced()
        ctx.prepare(model, sgd(model.parameters()), name="critic")

    refused("SyncBatchNorm 'norm' belongs to a job with several models", work, **ON)


def test_loaders_that_may_lack_a_slice_are_refused() -> None:
    refused("this loader may come to its end in the middle of a step", lambda ctx: prepared(ctx, Endless()), **ON)
    uneven = "an epoch of 5 batches ends with slices of different length .* a multiple of 4 batches"
    refused(uneven, lambda ctx: prepared(ctx, dataset(20), accumulate=2), **ON)


def test_a_pass_without_a_slice_is_refused() -> None:
    def work(ctx: Context) -> None:
        model, _, _ = prepared(ctx, dataset(16))
        model(torch.zeros(4, FEATURES))

    refused("'norm' was called in training mode outside of the loop .* call model.eval\\(\\) before", work, **ON)


def test_a_backward_pass_after_the_slice_is_refused() -> None:
    def work(ctx: Context) -> None:
        model, optimizer, loader = prepared(ctx, dataset(16))
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.backward()  # type: ignore[no-untyped-call]

    refused(r"the gradients of SyncBatchNorm 'bare' were asked for after the slice was handed in", work, **ON)


def test_asynchronous_mode_is_refused() -> None:
    with Cluster(mode="async") as cluster:
        ctx = cluster.context(0, consistency__mode="sync", **ON)
        with pytest.raises(errors.ModelError, match="the job is asynchronous"):
            prepared(ctx, dataset(16))
        ctx.close()
    with Cluster(sync_batchnorm=True) as cluster, pytest.raises(errors.ConfigError, match="the mode stays sync"):
        cluster.set_consistency("async")
