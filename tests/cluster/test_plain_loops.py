"""``for epoch in range(n): for batch in loader:`` trains what ``ctx.epochs(n)`` does; what cannot work is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, alone, inside, recorded, train, until, wait
from tests.support.cluster.programs import Ledger, Numbers, adamw, cosine, dataset, network, sgd
from tests.support.failover.rollback import Rig, Strike, same, twin

# 14 slices, the last one of 3 samples: 4 steps an epoch, the last one of 2 slices.
SAMPLES, BATCH, SLICES, EPOCHS = 107, 8, 4, 3

# What comes after each epoch; and (context, loader, epochs, that) -> batches.
After = Callable[[], object]
Loop = Callable[[Context, Any, int, After], Iterator[Any]]


def of_ctx_epochs(ctx: Context, loader: Any, epochs: int, after: After) -> Iterator[Any]:
    for _ in ctx.epochs(epochs):
        yield from loader
        after()


def of_range(ctx: Context, loader: Any, epochs: int, after: After) -> Iterator[Any]:
    for _ in range(epochs):
        yield from loader
        after()


class Bar:
    """As progress bars wrap what they show."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped, self.total = wrapped, len(wrapped)

    def __iter__(self) -> Iterator[Any]:
        yield from self.wrapped


def with_a_bar(ctx: Context, loader: Any, epochs: int, after: After) -> Iterator[Any]:
    for _ in range(epochs):
        for _, batch in enumerate(Bar(loader)):
            yield batch
        after()


def by_hand(ctx: Context, loader: Any, epochs: int, after: After) -> Iterator[Any]:
    """With a look at the first batch before, as many do to learn the shapes."""
    next(iter(loader))
    for _ in range(epochs):
        batches = iter(loader)
        while (batch := next(batches, None)) is not None:
            yield batch
        after()


def ctx_epochs_and_then_range(ctx: Context, loader: Any, epochs: int, after: After) -> Iterator[Any]:
    for epoch in ctx.epochs(epochs):
        yield from loader
        after()
        if epoch == 0:
            break
    yield from of_range(ctx, loader, epochs - 1, after)


LOOPS: dict[str, Loop] = {
    "range": of_range,
    "a bar and enumerate": with_a_bar,
    "iterators": by_hand,
    "ctx.epochs, then range": ctx_epochs_and_then_range,
}


class Script:
    """A training script with one of these loops, and a schedule per step or per epoch."""

    def __init__(
        self, loop: Loop, per_epoch: bool = False, each: Callable[[Context, int], object] | None = None
    ) -> None:
        self.loop, self.per_epoch, self.each = loop, per_epoch, each

    def __call__(self, ctx: Context) -> None:
        model: Any = network(norm=True)
        optimizer: Any = sgd(model.parameters()) if self.per_epoch else adamw(model.parameters())
        loader = ctx.prepare(DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True))
        schedule: Any = StepLR(optimizer, 1, 0.5) if self.per_epoch else cosine(optimizer, EPOCHS * len(loader))
        model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
        for slices, (x, y) in enumerate(self.loop(ctx, loader, EPOCHS, schedule.step if self.per_epoch else int)):
            loss: Any = F.cross_entropy(model(x), y)
            loss.backward()
            if self.each is not None:
                self.each(ctx, slices)
            optimizer.step()
            if not self.per_epoch:
                schedule.step()
            optimizer.zero_grad()


def wanted() -> Any:
    return twin("plain loops", Script(of_ctx_epochs), slices_per_step=SLICES)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", LOOPS)
def test_the_bits_of_ctx_epochs(name: str, workers: int) -> None:
    outcome = train(Script(LOOPS[name]), workers, 2, {"training.chunk_bytes": 512}, slices_per_step=SLICES)
    same(outcome.summary, wanted())
    assert outcome.summary["epochs"] == EPOCHS


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_alone(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"consistency__mode": mode, "training__slices_per_step": SLICES}
    plain = alone(Script(of_range), tmp_path, monkeypatch, **options)
    same(plain, alone(Script(of_ctx_epochs), tmp_path, monkeypatch, **options))
    assert plain["epochs"] == EPOCHS
    assert plain["contributions_applied"] == 14 * EPOCHS


# ---- every sample counts once in each epoch

CELLS = 60


class Count:
    """Each sample adds 1 to its cell; ``epochs`` passes in a plain loop. Notes how many batches each pass had."""

    def __init__(self, epochs: int, each: Callable[[Context, int], object] | None = None) -> None:
        self.epochs, self.each = epochs, each
        self.batches: dict[int, list[int]] = {}

    def __call__(self, ctx: Context) -> None:
        model: nn.Module = Ledger(CELLS)
        loader: Any = DataLoader(Numbers(CELLS), batch_size=2, shuffle=True)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        mine = self.batches.setdefault(ctx.rank, [])
        for _ in range(self.epochs):
            mine.append(0)
            for indices in loader:
                model(indices).backward()
                if self.each is not None:
                    self.each(ctx, sum(mine))
                optimizer.step()
                optimizer.zero_grad()
                mine[-1] += 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_comes_late_has_empty_passes_first(mode: str) -> None:
    there, go = threading.Event(), threading.Event()

    def hold(ctx: Context, slices: int) -> None:
        if ctx.rank == 0 and slices == 40:  # of 30 in an epoch
            there.set()
            wait(go, "the word to go on")

    script = Count(3, hold)
    with recorded() as log, Cluster(1, 2, mode, slices_per_step=4, grace_s=0.1) as cluster:
        first = cluster.start(script)
        wait(there, "the second epoch")
        late = cluster.start(script)
        until("the second worker trains", lambda: sum(script.batches.get(1, [])) or late.error or mode == "sync")
        go.set()
        cluster.join([first, late])
        outcome = cluster.outcome()
    assert outcome.summary["contributions_applied"] == 90
    assert outcome.summary["epochs"] == 3
    assert len(script.batches[1]) == 3
    assert script.batches[1][0] == 0, "the first epoch was over"
    assert sum(script.batches[1]) > 0
    assert len({(a.shard, a.contribution.name) for a in log}) == len(log)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_with_different_numbers_of_passes_end_with_the_larger_one(mode: str) -> None:
    short, long = Count(1), Count(3)
    with Cluster(2, 1, mode, slices_per_step=4) as cluster:
        cluster.join([cluster.start(short), cluster.start(long)])
        outcome = cluster.outcome()
    assert outcome.summary["contributions_applied"] == 90
    assert outcome.summary["epochs"] == 3


def test_the_end_of_a_pass_is_the_end_of_the_epoch_in_asynchronous_mode() -> None:
    """Nobody knows which pass is the last one, and a script that has ended could not do what a dead worker left."""
    seen: list[int] = []

    class Looks(Count):
        def __call__(self, ctx: Context) -> None:
            super().__call__(ctx)
            seen.append(ctx.version)

    with Cluster(3, 1, "async", "unbounded") as cluster:
        cluster.train(Looks(2))
    assert seen == [60, 60, 60]


# ---- breaking off


def test_what_a_pass_leaves_is_the_first_of_the_next_one(capfd: pytest.CaptureFixture[str]) -> None:
    """Ten batches of each pass, three passes: all samples of the data have been seen once."""
    seen: list[int] = []

    def script(ctx: Context) -> None:
        model: Any = Ledger(CELLS)
        loader: Any = DataLoader(Numbers(CELLS), batch_size=2, shuffle=True)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for passes in (3, 1):
            for _ in range(passes):
                for indices in itertools.islice(loader, 10):
                    seen.extend(indices.tolist())
                    model(indices).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if passes == 3:
                assert sorted(seen) == list(range(CELLS))

    assert train(script).summary["contributions_applied"] == 40
    assert "the script ends in the middle of epoch 4: what is left of that" in capfd.readouterr().err


def test_a_schedule_per_epoch_after_break() -> None:
    """Its step is outside of the loop, though the loop was left in the middle."""
    rates: list[float] = []

    def script(ctx: Context) -> None:
        model: Any = Ledger(CELLS)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        loader: Any = DataLoader(Numbers(CELLS), batch_size=2)
        schedule: Any = StepLR(optimizer, 1, 0.5)
        model, optimizer, loader, schedule = ctx.prepare(model, optimizer, loader, schedule)
        for _ in range(3):
            for number, indices in enumerate(loader):
                model(indices).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 4:
                    break
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])

    train(script)
    assert rates == [0.5, 0.25, 0.125]


# ---- what is refused


def small(ctx: Context) -> tuple[Any, Any, Any]:
    model: nn.Module = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = ctx.prepare(model, optimizer, DataLoader(dataset(16), batch_size=4))
    assert isinstance(prepared, tuple)
    return prepared


def fit(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluates(ctx: Context) -> None:
    model, optimizer, loader = small(ctx)
    fit(model, optimizer, loader)
    with torch.no_grad():
        for x, _ in loader:
            model(x)


def twice_in_an_epoch(ctx: Context) -> None:
    _, _, loader = objects = small(ctx)
    for _ in ctx.epochs(2):
        fit(*objects)
        sum(1 for _ in loader)


def after_the_last_epoch(ctx: Context) -> None:
    _, _, loader = objects = small(ctx)
    for _ in ctx.epochs(2):
        fit(*objects)
    sum(1 for _ in loader)


def nested(ctx: Context) -> None:
    objects = small(ctx)
    for _ in ctx.epochs(1):
        for _ in range(3):
            fit(*objects)


def two_at_once(ctx: Context) -> None:
    model, optimizer, loader = small(ctx)
    for (x, _), (y, _) in zip(loader, loader, strict=True):
        (model(x) - model(y)).mean().backward()
        optimizer.step()


def without_a_model(ctx: Context) -> None:
    for _ in ctx.prepare(DataLoader(dataset(16), batch_size=4)):
        pass


def after_the_end(ctx: Context) -> None:
    _, _, loader = small(ctx)
    ctx.close()
    next(iter(loader))


REFUSED: list[tuple[Callable[[Context], None], str]] = [
    (evaluates, "where gradients are off, and without optimizer.step()"),
    (twice_in_an_epoch, "has given all of its slices of epoch 1: iterate over it once"),
    (nested, "has given all of its slices of epoch 1: iterate over it once"),
    (after_the_last_epoch, r"ctx\.epochs\(2\) has come to its end, and the prepared loader"),
    (two_at_once, "another iteration over the prepared loader has begun"),
    (without_a_model, "give the model and its optimizer to ctx.prepare before iterating"),
    (after_the_end, "this worker has left the job"),
]


@pytest.mark.parametrize(("script", "text"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(script: Callable[[Context], None], text: str) -> None:
    with pytest.raises(errors.UserError, match=text) as caught:
        inside(script)
    assert "\n" not in str(caught.value)


# ---- the job goes back

# 12 steps, 4 in an epoch; a checkpoint of versions 0, 6 and 12.
STRIKES = {
    "within an epoch": [Strike("apply.mid", "server-1", 1)],
    "into an earlier epoch": [Strike("commit.before_log", "server-0", 8)],
    "at the end of an epoch": [Strike("commit.after_log_before_reply", "server-1", 7)],
}


@pytest.mark.parametrize("per_epoch", [False, True], ids=["per step", "per epoch"])
@pytest.mark.parametrize(
    "when",
    [
        pytest.param("within an epoch", marks=pytest.mark.long),
        "into an earlier epoch",
        pytest.param("at the end of an epoch", marks=pytest.mark.long),
    ],
)
def test_the_job_goes_back(when: str, per_epoch: bool, tmp_path: Path) -> None:
    with Rig(tmp_path, 6, [Strike(s.at, s.who, s.step) for s in STRIKES[when]]) as rig:
        rig.begin(Script(of_range, per_epoch))
        summary = rig.finish()
        assert rig.rollbacks >= 1
    key = f"plain loops {per_epoch}"
    same(summary, twin(key, Script(of_ctx_epochs, per_epoch), slices_per_step=SLICES))
    assert summary["epochs"] == EPOCHS


@pytest.mark.long
def test_the_job_goes_back_when_the_scripts_have_ended(tmp_path: Path) -> None:
    """While the last version is written. Workers that are started again do what is undone, in their later passes."""
    strike = Strike("ckpt.before_fsync", "server-1", 12)
    with Rig(tmp_path, 6, [strike]) as rig:
        rig.again_s = 1.0  # so that the scripts end before the job goes back
        rig.begin(Script(of_range))
        wait(strike.done, "the last version is written")
        rig.join_all()
        until("the job went back", lambda: rig.rollbacks == 1)
        assert not rig.record().finished
        rig.work(Script(of_range))
        summary = rig.finish()
    same(summary, wanted())


def test_a_loop_that_ends_by_the_version_has_the_same_bits_for_any_number_of_workers() -> None:
    """``next(it)`` until so many updates are made. With a count of its own batches each worker would end elsewhere."""

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(32), batch_size=4, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        batches = iter(loader)
        while ctx.version < 6:
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                continue
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        assert ctx.version == 6

    one, two = (train(script, workers, 1, slices_per_step=2) for workers in (1, 2))
    assert one.summary["steps"] == two.summary["steps"] == 6
    assert one.digests == two.digests
