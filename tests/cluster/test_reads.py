"""A forward pass that begins while weights are on their way: the same bits, however the script reads them."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from torch import nn
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.tensors.codec import split_frame
from paramserver.transport.base import Channel, Place
from paramserver.worker.context import Context
from paramserver.worker.engine import Engine
from paramserver.worker.engine.rollback import Rollback
from paramserver.worker.weights import rest
from paramserver.worker.weights.incoming import IncomingWeights
from paramserver.worker.weights.reads import Reads
from paramserver.worker.weights.weights import Weights
from tests.support.cluster.early import DATA, OPTIONS, clip, script
from tests.support.cluster.faults import Fault, FaultPlan, Rule
from tests.support.cluster.harness import Cluster, digest, train, train_without, until
from tests.support.cluster.programs import (
    CLASSES,
    FEATURES,
    LedgerProgram,
    Program,
    adamw,
    dataset,
    fill,
    model_of,
    network,
    plain,
)
from tests.support.cluster.taps import Commands, TappedChannel


@pytest.fixture(autouse=True)
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Scripts begin before the weights of small models are there, too. Counts how often, and what came of it."""
    found: Counter[str] = Counter()
    made, settle, unread = IncomingWeights.__init__, IncomingWeights.settle, IncomingWeights.unread

    def counted(self: IncomingWeights, *args: Any) -> None:
        found["begun"] += 1
        made(self, *args)

    def settled(self: IncomingWeights) -> None:
        try:
            settle(self)
        except errors.StaleViewError:
            found["in vain"] += 1
            raise

    def left(self: IncomingWeights, tensors: Collection[int]) -> frozenset[int]:
        unnoticed = unread(self, tensors)
        found["in vain"] += bool(unnoticed)
        return unnoticed

    monkeypatch.setattr(rest, "LEAST_BYTES", 0)
    monkeypatch.setattr(IncomingWeights, "__init__", counted)
    monkeypatch.setattr(IncomingWeights, "settle", settled)
    monkeypatch.setattr(IncomingWeights, "unread", left)
    yield found
    assert found["begun"] > 0


# The digests of the same training where every forward waits for all weights.
plainly = partial(train_without, rest)


@pytest.mark.parametrize("each", [None, clip], ids=["ahead", "clipped"])
def test_same_bits(each: Any, monkeypatch: pytest.MonkeyPatch, count: Counter[str]) -> None:
    digests = train(script(each), **OPTIONS).digests
    # Each of two workers takes in six versions.
    assert count == {"begun": 12, "in vain": 0}
    assert digests == plainly(script(each), monkeypatch, **OPTIONS)


# ---- scripts that look at their weights between steps


def as_arrays(model: nn.Module) -> list[torch.Tensor]:
    return [torch.from_numpy(parameter.data.numpy()).clone() for parameter in model.parameters()]


def as_saved(model: nn.Module) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return list(torch.load(file, weights_only=False).parameters())


def as_state(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def as_numbers(model: nn.Module) -> list[torch.Tensor]:
    return [torch.tensor(parameter.tolist()) for parameter in model.parameters()]


class Looks:
    """Trains, and notes the digest of the weights that it sees outside of any module, by version.

    Both workers see the same weights at the same version. A slow worker may miss versions. Version 0 is seen only by a
    worker that computes both slices of the first step.
    """

    def __init__(self, look: Callable[[nn.Module], list[torch.Tensor]]) -> None:
        self.look = look
        self.seen: dict[int, str] = {}

    def __call__(self, ctx: Context) -> None:
        model = network(hidden=100)
        loader: Any = DataLoader(DATA, batch_size=8)
        model, optimizer, loader = ctx.prepare(model, adamw(model.parameters()), loader)
        for _ in ctx.epochs(2):
            for x, y in loader:
                loss: Any = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                self.note(ctx, model)
                optimizer.zero_grad()
            self.note(ctx, model)

    def note(self, ctx: Context, model: nn.Module) -> None:
        """The weights are those that any worker has seen at this version.

        A slow worker may get a newer version when it looks, if the servers have dropped the rest of the previous one.
        """
        found = digest(*self.look(model))
        assert self.seen.setdefault(ctx.version, found) == found


@pytest.mark.parametrize("look", [as_arrays, as_saved, as_state, as_numbers])
def test_whoever_looks_at_weights_sees_those_of_the_version(
    look: Any, monkeypatch: pytest.MonkeyPatch, count: Counter[str]
) -> None:
    looks, twin = Looks(look), Looks(look)
    digests = train(looks, **OPTIONS).digests
    assert digests == plainly(twin, monkeypatch, **OPTIONS)
    for seen in (looks.seen, twin.seen):
        seen.pop(0, None)
    assert looks.seen == twin.seen
    assert len(set(looks.seen.values())) == 6
    assert not count["in vain"]


# ---- scripts that read where nobody tells of it


class Elsewhere(nn.Module):
    """Its second layer computes in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 40), nn.Linear(40, CLASSES)
        fill(self)
        self._thread = ThreadPoolExecutor(1)

    def forward(self, x: torch.Tensor) -> Any:
        """Scores of the classes."""
        return self._thread.submit(self.second, torch.tanh(self.first(x))).result()


_ONE_AT_A_TIME = threading.Lock()


def scripted() -> nn.Module:
    with _ONE_AT_A_TIME:
        found: nn.Module = torch.jit.script(network(hidden=40))
    return found


@pytest.mark.parametrize("model", [Elsewhere, scripted])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_reads_that_are_not_told_of_are_noticed_and_the_slice_is_computed_again(
    model: Any, monkeypatch: pytest.MonkeyPatch, count: Counter[str]
) -> None:
    program = Program(DATA, 8, 2, model, adamw)
    digests = train(program, **OPTIONS).digests
    assert count == {"begun": 2, "in vain": 2}  # once by each worker, and never again
    if model is not scripted:  # TorchScript's first pass yields other bits than the ones after it
        assert digests == plainly(program, monkeypatch, **OPTIONS)


class OfItsOwn(nn.Module):
    """torch compiles what is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(hidden=40)

    def forward(self, x: torch.Tensor) -> Any:
        """Scores of the classes."""
        return torch.tanh(self.layers(x))


@pytest.mark.parametrize("of_its_own", [True, False])
def test_scripts_whose_model_is_compiled_have_all_weights_at_once(
    of_its_own: bool, monkeypatch: pytest.MonkeyPatch, count: Counter[str]
) -> None:
    from torch._dynamo import eval_frame

    monkeypatch.setattr(eval_frame, "cached_backends", {})

    def model() -> Any:
        found: Any = OfItsOwn() if of_its_own else network(hidden=40)
        found.compile(backend="eager")
        return found

    program = Program(DATA, 8, 2, model, adamw)
    digests = train(program, **OPTIONS).digests
    assert eval_frame.cached_backends
    assert count == {"begun": 2, "in vain": 0}
    assert digests == plainly(program, monkeypatch, **OPTIONS)


class Moved(nn.Module):
    """Its weights are where this script has put them, or of a narrower type than those of the servers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = network(hidden=40).to(dtype)
        self.dtype, self.moves = dtype, 0

    def forward(self, x: torch.Tensor) -> Any:
        """Scores of the classes."""
        self.moves += 1
        if self.dtype is torch.float32 and self.moves == 2:
            for parameter in self.parameters():
                parameter.data = parameter.data.clone()
        return self.layers(x.to(self.dtype)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_lie_elsewhere_are_waited_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, count: Counter[str]
) -> None:
    program = Program(DATA, 8, 2, lambda: Moved(dtype), adamw)
    digests = train(program, **OPTIONS).digests
    assert count == {"begun": 4 if dtype is torch.float32 else 2, "in vain": 0}
    assert digests == plainly(program, monkeypatch, **OPTIONS)


@pytest.mark.parametrize("around", ["all", "each"])
def test_modes_of_the_script_go_on_as_before(around: str, monkeypatch: pytest.MonkeyPatch, count: Counter[str]) -> None:
    def each(ctx: Context, number: int) -> None:
        if around == "each":
            with BaseTorchFunctionMode():
                clip(ctx, number)

    def run(ctx: Context) -> None:
        with BaseTorchFunctionMode() if around == "all" else nullcontext():
            script(each)(ctx)
        assert not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    digests = train(run, **OPTIONS).digests
    assert count == {"begun": 2 if around == "all" else 12, "in vain": 0}
    assert digests == plainly(run, monkeypatch, **OPTIONS)


# ---- networks and jobs in which something goes wrong


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.DROP_REQUEST, Fault.DUPLICATE])
def test_over_a_bad_network(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan([Rule("Shard.Pull", fault, 0.3)], seed=7)
    outcome = train(script(clip), **OPTIONS, faults=plan)
    plan.check()
    assert outcome.digests == plainly(script(clip), monkeypatch, **OPTIONS)


def test_weights_that_do_not_come_any_more_have_the_slice_computed_again(count: Counter[str]) -> None:
    """Asynchronous: when a pull that broke off is asked for again, shards are further. Every sample counts once."""
    plan = FaultPlan([Rule("Shard.Pull", Fault.LOSE_REPLY, 0.3)], seed=3)
    options: dict[str, Any] = {"mode": "async", "staleness": "unbounded", "settings": {"training.chunk_bytes": 64}}
    outcome = train(LedgerProgram(120, 2, 2), 3, 2, faults=plan, **options)
    plan.check()
    assert count["in vain"] > 0
    assert torch.equal(outcome.tensor("cells"), torch.full((120,), 2.0))


def test_weights_that_are_waited_for_and_never_come_are_asked_for_again(count: Counter[str]) -> None:
    """Asynchronous, in a mode of the script's own: nobody is told of reads, which is tried again for each slice."""
    plan = FaultPlan([Rule("Shard.Pull", Fault.LOSE_REPLY, 0.3)], seed=1)
    options: dict[str, Any] = {"mode": "async", "staleness": "unbounded", "settings": {"training.chunk_bytes": 64}}

    def each(ctx: Context, number: int) -> None:
        assert ctx.engine.weights.reads is None
        ctx.engine.weights.listen(Reads(list(model_of(ctx).parameters())))

    def run(ctx: Context) -> None:
        with BaseTorchFunctionMode():
            LedgerProgram(120, 2, 2, each)(ctx)

    outcome = train(run, 3, 2, faults=plan, **options)
    plan.check()
    assert count["begun"] > 50
    assert count["in vain"] > 0
    assert torch.equal(outcome.tensor("cells"), torch.full((120,), 2.0))


def test_a_job_that_goes_back_at_the_end_of_an_epoch_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the last weights of the epoch are waited for."""
    complete, followed = Weights.complete, list[int]()

    def goes_back(self: Weights) -> None:
        complete(self)
        raise errors.RolledBackError("the job goes back to a checkpoint")

    monkeypatch.setattr(Weights, "complete", goes_back)
    monkeypatch.setattr(Rollback, "follow", lambda self: followed.append(self.open_epoch()))
    train(script(), **OPTIONS)
    assert sorted(followed) == [1, 1, 2, 2]


# ---- the order of things


class Withheld(TappedChannel):
    """Keeps back what follows the first chunk of a pull's answer, from the second pull on, until it is told."""

    def __init__(self, inner: Channel, told: threading.Event) -> None:
        async def nothing(*_: Any) -> Any:
            return 0

        super().__init__(inner, nothing, nothing, Commands())
        self._told = told
        self.withheld = 0

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        chunks = 0
        async for raw in self._inner.download(method, request, timeout=timeout, place=place):
            _, parts = split_frame(raw)
            if chunks and not self._told.is_set():
                self.withheld += 1
                waiting = asyncio.get_running_loop().run_in_executor(None, self._told.wait, 20.0)
                assert await waiting, "nobody has told that the first layer has computed"
            chunks += len(list(parts))
            yield raw


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_first_layer_computes_while_the_second_waits_for_its_weights(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.server.versions.version._FRAME_BYTES", 1)
    told, order = threading.Event(), list[str]()
    engines: list[Engine] = []

    def each(ctx: Context, number: int) -> None:
        ctx.clip_grad_norm(0.1)  # so that nothing comes ahead
        if number == 0:
            engines.append(ctx.engine)
            links = ctx.engine.shards.links
            links.channels[0] = Withheld(links.channels[0], told)
            threading.Thread(target=release, daemon=True).start()

    def release() -> None:
        until("the first layer has computed again", lambda: order.count("layer 0") == 2)
        until("the script waits for weights", lambda: engines[0].member.waiting_for == "weights of server-0")
        order.append("released")
        told.set()

    def model() -> nn.Module:
        found = nn.Sequential(nn.Linear(FEATURES, 16, bias=False), nn.Linear(16, CLASSES, bias=False))
        for index, layer in enumerate(found):
            layer.register_forward_hook(lambda *_, name=f"layer {index}": order.append(name))
        return fill(found)

    program = Program(dataset(16), 8, 1, model, plain, each=each)
    with Cluster(mode=mode) as cluster:
        worker = cluster.start(program, {"training__chunk_bytes": 64 * FEATURES})
        cluster.join([worker])
        assert engines[0].member.waiting_for == ""
    assert order == ["layer 0", "layer 1", "layer 0", "released", "layer 1"]
