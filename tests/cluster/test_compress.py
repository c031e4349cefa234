"""Whole jobs whose weights or gradients travel in fewer bytes: the same bits on every path, whoever dies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paramserver import errors
from paramserver.compress.registry import push_compressor
from paramserver.tensors.dtypes import buffer_of, torch_dtype
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref
from paramserver.worker.context import Context
from paramserver.worker.gradients.hooks import PushBucket
from tests.support.cluster.harness import Cluster, Outcome, buffered, inside, train, until, wait
from tests.support.cluster.programs import Program, adamw, dataset, model_of, network, sgd
from tests.support.cluster.raw import Raw, SyncName
from tests.support.failover.rollback import Rig, Strike, same

# 19 slices of up to 4 samples, in steps of four: the last step of an epoch has three.
DATA = dataset(74)
BATCH, SLICES = 4, 4
LOSSY = ("bf16", "fp16", "int8", "topk")
# Every chunk has several blocks of int8; every server of three has some.
CHUNK = 2048


def program(epochs: int = 2, **options: Any) -> Program:
    return Program(DATA, BATCH, epochs, **{"model": partial(network, norm=True, hidden=201), **options})


def settings(push: str = "none", pull: str = "fp32", **more: object) -> dict[str, object]:
    return {
        "training.chunk_bytes": CHUNK,
        "training.push_compression": push,
        "training.pull_precision": pull,
        "training.topk_ratio": 0.05,
        **more,
    }


def job(push: str = "none", pull: str = "fp32", script: Program | None = None, **options: Any) -> Outcome:
    return train(script or program(), settings=settings(push, pull), slices_per_step=SLICES, **options)


_plain: dict[tuple[str, str], Outcome] = {}


def plain(push: str = "none", pull: str = "fp32") -> Outcome:
    """One worker, one server, everything over messages. Worked out once."""
    if (push, pull) not in _plain:
        _plain[push, pull] = job(push, pull)
    return _plain[push, pull]


@pytest.mark.parametrize(
    ("push", "pull", "workers", "servers"),
    [
        *(pytest.param(push, "fp32", 3, 2, marks=[] if push == "topk" else pytest.mark.long) for push in LOSSY),
        ("none", "bf16", 2, 1),
        ("int8", "fp32", 2, 1),
        ("int8", "fp16", 3, 2),
    ],
)
def test_the_bits_depend_on_no_number_of_processes(push: str, pull: str, workers: int, servers: int) -> None:
    assert job(push, pull, workers=workers, servers=servers).digests == plain(push, pull).digests


@pytest.mark.parametrize(("push", "pull"), [("bf16", "fp32"), ("int8", "fp32"), ("topk", "bf16"), ("none", "fp16")])
def test_the_bits_are_the_same_over_shared_memory(push: str, pull: str) -> None:
    with Cluster(workers=2, servers=2, slices_per_step=SLICES, transport="shm") as cluster:
        found = cluster.train(program(), settings(push, pull)).digests
        assert {w.context.engine.shards.links.near.kind for w in cluster.workers if w.context is not None} == {"shm"}
    assert found == plain(push, pull).digests


def test_every_kind_is_another_training() -> None:
    """Else the tests above would hold whatever was switched on."""
    kinds = [("none", "fp32"), *((push, "fp32") for push in LOSSY), ("none", "bf16"), ("none", "fp16")]
    assert len({plain(push, pull).digests[0] for push, pull in kinds}) == len(kinds)


@pytest.mark.parametrize(("push", "most"), [("bf16", 0.01), ("fp16", 0.001), ("int8", 0.03), ("topk", 0.6)])
def test_it_still_learns(push: str, most: float) -> None:
    """The weights end not far from those of exact training, beside the way that they have gone."""
    exact, found = plain(), plain(push)
    weight, other = exact.tensor("0.weight"), found.tensor("0.weight")
    moved = (weight - network(norm=True, hidden=201)[0].weight.detach()).norm()  # type: ignore[index]
    assert float((weight - other).norm() / moved) < most


def test_fewer_bytes_are_sent() -> None:
    def pushed(push: str) -> int:
        with Cluster(slices_per_step=1) as cluster:
            cluster.train(program(1, model=partial(network, hidden=900)), settings(push))
            return cluster.stats()[0].bytes_pushed

    exact = pushed("none")
    assert exact / pushed("bf16") == pytest.approx(2.0, rel=0.02)
    # One of the 19 pushes of the epoch is a flush.
    assert exact / pushed("int8") > 2.8
    assert exact / pushed("topk") > 4


@pytest.mark.parametrize("pull", ["bf16", "fp16"])
def test_workers_see_rounded_weights_and_servers_keep_exact_ones(pull: str) -> None:
    seen: list[torch.Tensor] = []
    statistics: list[torch.Tensor] = []

    def look(ctx: Context, _: int) -> None:
        model = model_of(ctx)
        seen.append(next(model.parameters()).detach().clone())
        statistics.append(next(model.buffers()).clone())

    outcome = job("none", pull, script=program(each=look))
    dtype = torch_dtype({"bf16": "bfloat16", "fp16": "float16"}[pull])
    assert all(weights.equal(weights.to(dtype).float()) for weights in seen)
    master = outcome.tensor("0.weight")
    assert not master.equal(master.to(dtype).float())
    assert not statistics[-1].equal(statistics[-1].to(dtype).float())


def test_bfloat16_models_lose_nothing_by_it() -> None:
    """They round what they pull anyway."""

    def outcome(pull: str) -> Outcome:
        script = Program(dataset(74, torch.bfloat16), BATCH, model=partial(network, dtype=torch.bfloat16))
        return job("none", pull, script=script)

    assert outcome("bf16").digests == outcome("fp32").digests


def test_asynchronous_workers_compress_too() -> None:
    """Each keeps what it leaves out; every slice counts once."""
    outcome = job("int8", "bf16", workers=2, servers=2, mode="async", staleness=1)
    assert outcome.summary["contributions_applied"] == 2 * 19


def test_without_checkpoints_a_newcomer_costs_residuals_and_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody can go back, so the job goes on, with other bits."""
    with Cluster(workers=2, slices_per_step=SLICES, residuals=True) as cluster:
        late: list[object] = []

        def join(ctx: Context, _: int) -> None:
            if ctx.version == 1 and not late:
                late.append(cluster.start(program(3), settings("int8")))
                until("the newcomer is there", lambda: len(cluster.status().view.workers) == 3)

        cluster.start(program(3, each=join), settings("int8"))
        cluster.start(program(3), settings("int8"))
        cluster.join()
        summary = cluster.outcome().summary
    assert summary["contributions_applied"] == 3 * 19
    assert "what compression had left out of some contributions is lost" in capfd.readouterr().err


# ---- who dies

EVERY = 3
RIG: dict[str, Any] = {
    "training__push_compression": "int8",
    "training__pull_precision": "bf16",
    "training__residual_flush_every": EVERY,
}


@pytest.fixture(scope="module")
def undisturbed() -> Mapping[str, Any]:
    """The summary of the same training with one worker and one server, who live."""
    options = settings("int8", "bf16", **{"training.residual_flush_every": EVERY})
    return train(program(), settings=options, slices_per_step=SLICES).summary


@pytest.mark.parametrize(
    "strikes",
    [
        pytest.param([Strike("worker.after_grad", "worker-1", 1)], marks=pytest.mark.long),
        [Strike("worker.after_grad", "worker-1", 7)],
        [Strike("worker.after_pull", "worker-1", 8)],
        pytest.param(
            [Strike("worker.after_grad", "worker-1", 7), Strike("coord.before_timeline", "leader")],
            marks=pytest.mark.long,
        ),
        pytest.param(
            [Strike("worker.after_grad", "worker-1", 7), Strike("coord.after_generation", "leader")],
            marks=pytest.mark.long,
        ),
        [Strike("worker.after_grad", "worker-1", 7), Strike("restore.after_load", "server-0")],
    ],
    ids=lambda strikes: ", ".join(f"{strike.at} {strike.step}" for strike in strikes),
)
def test_a_worker_that_dies_takes_nothing_along(
    strikes: list[Strike], tmp_path: Path, undisturbed: Mapping[str, Any]
) -> None:
    """Its residuals are gone, so all go back to the last checkpoint, and another worker does its part.

    Also if the coordinator is lost while it is about to have them go back, or a server while it does.
    """
    with Rig(tmp_path, EVERY, strikes, lease_s=1.0, training__chunk_bytes=CHUNK, **RIG) as rig:
        rig.begin(program())
        wait(strikes[0].done, "the death")
        summary = rig.finish([rig.hands[0]])
        assert rig.rollbacks >= 1
    same(summary, undisturbed)


def test_a_server_that_dies_costs_no_residuals(tmp_path: Path, undisturbed: Mapping[str, Any]) -> None:
    strikes = [Strike("apply.mid", "server-1", 7)]
    with Rig(tmp_path, EVERY, strikes, training__chunk_bytes=CHUNK, **RIG) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert rig.rollbacks == 1
    same(summary, undisturbed)


def test_a_newcomer_begins_with_all_at_a_checkpoint(tmp_path: Path, undisturbed: Mapping[str, Any]) -> None:
    came: list[object] = []

    def join(ctx: Context, _: int) -> None:
        if ctx.version == 7 and ctx.rank == 0 and not came:
            came.append(rig.work(program()))
            until("the newcomer is there", lambda: len(rig.record().members) == 5)

    with Rig(tmp_path, EVERY, training__chunk_bytes=CHUNK, **RIG) as rig:
        rig.begin(program(each=join))
        summary = rig.finish()
        assert rig.rollbacks >= 1
    same(summary, undisturbed)


# ---- hooks


def scripted(hook: Any, state: Any = None) -> Outcome:
    """A job whose workers register a push hook."""

    def register(ctx: Context, slices: int) -> None:
        if slices == 0:
            ctx.register_push_hook(state, hook)

    return job(script=program(each=register), workers=2)


def test_a_hook_of_the_script_is_asked_for_every_bucket() -> None:
    """One that returns bfloat16 is what the setting "bf16" is; one that returns what it got changes nothing."""

    def halve(state: Any, bucket: PushBucket) -> torch.Tensor:
        state.append((bucket.index(), bucket.is_last(), bucket.samples()))
        assert sum(gradient.numel() for gradient in bucket.gradients()) <= bucket.buffer().numel()
        assert len(bucket.parameters()) == len(bucket.gradients())
        return bucket.buffer().to(torch.bfloat16)

    seen: list[tuple[int, bool, int]] = []
    assert scripted(halve, seen).digests == plain("bf16").digests
    indices = {index for index, _, _ in seen}
    # A slice that takes long on one worker may be computed by another one, too.
    assert all(sum(one == index for one, _, _ in seen) >= 2 * 19 for index in indices)
    assert {index for index, last, _ in seen if last} == {max(indices)}
    assert {samples for _, _, samples in seen} == {4, 2}


def test_a_hook_may_return_a_future() -> None:
    def later(_: Any, bucket: PushBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    assert scripted(later).digests == plain().digests


def raising(_: Any, bucket: PushBucket) -> torch.Tensor:
    raise KeyError("momentum")


def short(_: Any, bucket: PushBucket) -> torch.Tensor:
    return bucket.buffer()[:-1]


def not_a_number(_: Any, bucket: PushBucket) -> torch.Tensor:
    return bucket.buffer() * torch.nan


def integers(_: Any, bucket: PushBucket) -> torch.Tensor:
    return bucket.buffer().to(torch.int32)


def nothing(_: Any, bucket: PushBucket) -> Any:
    return None


@pytest.mark.parametrize(
    ("hook", "error", "said"),
    [
        (raising, errors.UserError, "the push hook raising failed at bucket 0: KeyError: 'momentum'"),
        (short, errors.UserError, "the push hook short returned 511 numbers for bucket 0 of 512"),
        (not_a_number, errors.NonFiniteError, "the push hook not_a_number returned NaN or an infinity for bucket 0"),
        (integers, errors.UserError, "the push hook integers returned torch.int32 for bucket 0"),
        (nothing, errors.UserError, "the push hook nothing returned NoneType for bucket 0"),
    ],
)
def test_a_hook_that_errs_is_named(hook: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        scripted(hook)


def test_hooks_that_cannot_be_registered() -> None:
    def register(ctx: Context) -> None:
        with pytest.raises(errors.UserError, match=r"after ctx\.prepare of the model"):
            ctx.register_push_hook(None, nothing)
        model = network()
        ctx.prepare(model, sgd(model.parameters()))
        by_name: Any = "bf16"
        with pytest.raises(errors.UserError, match=r"set training\.push_compression to one of none, bf16, "):
            ctx.register_push_hook(None, by_name)
        ctx.register_push_hook(None, nothing)
        with pytest.raises(errors.UserError, match="there is a push hook already"):
            ctx.register_push_hook(None, nothing)

    inside(register)


def test_a_hook_beside_compression_is_refused() -> None:
    with Cluster() as cluster:
        ctx = cluster.context(0, training__push_compression="bf16")
        model = network()
        ctx.prepare(model, adamw(model.parameters()))
        with pytest.raises(errors.UserError, match=r'training\.push_compression is "bf16": use that, or a push hook'):
            ctx.register_push_hook(None, nothing)
        ctx.close()


# ---- what arrives at a server


def payload(values: torch.Tensor, name: str) -> torch.Tensor:
    compressor = push_compressor(name)
    assert compressor is not None
    return compressor.encode(values, None)


def with_scale(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(made: torch.Tensor) -> torch.Tensor:
        made[:4].view(torch.float32)[0] = scale
        return made

    return change


def cut(made: torch.Tensor) -> torch.Tensor:
    return made[:-64].contiguous()


def repeated(made: torch.Tensor) -> torch.Tensor:
    made[8:12] = made[4:8]
    return made


def infinite_value(made: torch.Tensor) -> torch.Tensor:
    count = int(made[:4].view(torch.int32))
    made[4 + 4 * count : 8 + 4 * count].view(torch.float32)[0] = torch.inf
    return made


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("int8", with_scale(0.0), errors.ProtocolError),
        ("int8", with_scale(float("nan")), errors.ProtocolError),
        ("int8", with_scale(float("inf")), errors.ProtocolError),
        ("int8", cut, errors.ProtocolError),
        ("bf16", cut, errors.ProtocolError),
        ("topk", repeated, errors.ProtocolError),
        ("topk", infinite_value, errors.NonFiniteError),
    ],
)
def test_a_broken_payload_is_refused_and_changes_nothing(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], error: type[Exception]
) -> None:
    with Cluster(slices_per_step=2) as cluster:
        client = cluster.client(0)
        client.init({"a": torch.ones(1024)}, "sgd", lr=1.0)
        raw = Raw(cluster)
        slice_0 = SyncName(0, 0, 1, 2)
        made = change(payload(torch.randn(1024, generator=torch.Generator().manual_seed(1)), name))
        encoding = {"int8": shard_pb2.ENCODING_INT8, "bf16": shard_pb2.ENCODING_BF16, "topk": shard_pb2.ENCODING_TOPK}
        ref = chunk_ref(raw.layout.chunks[0], encoding[name], made.numel())
        with pytest.raises(error):
            raw.push(raw.frames(raw.header(slice_0, [0]), [(ref, bytes(buffer_of(made)))]))
        assert cluster.call_in_loop(lambda: buffered(cluster.job.servers[0].service)) == 0
        client.close()


def test_weights_are_rounded_and_not_compressed() -> None:
    with Cluster(slices_per_step=2) as cluster:
        client = cluster.client(0)
        client.init({"a": torch.ones(1024)}, "sgd", lr=1.0)
        raw = Raw(cluster)

        async def pull() -> None:
            request = shard_pb2.PullRequest(job=raw.job, worker=1, latest=True, encoding=shard_pb2.ENCODING_INT8)
            async with aclosing(raw.channel.download("Shard.Pull", request, timeout=20.0)) as frames:
                async for _ in frames:
                    pass

        with pytest.raises(errors.ProtocolError, match="the encoding int8 has no place in this message"):
            raw.run(pull())
        client.close()
