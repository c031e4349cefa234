"""Shared memory between workers and servers: every path gives the bits of the plain one."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paramserver import errors
from paramserver.server.versions.sharing import STRANGERS
from paramserver.transport.shm import meeting
from paramserver.transport.shm.meeting import Meeting
from paramserver.transport.shm.segments import PAGE, Segment
from paramserver.v1 import shard_pb2
from paramserver.worker.context import Context
from paramserver.worker.flat import FlatSpace
from tests.support.cluster.harness import Cluster, Outcome, train, until
from tests.support.cluster.programs import LedgerProgram, Program, adamw, dataset, fill, model_of, network, plain
from tests.support.cluster.raw import Raw
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.moments import EVERY, MOMENTS, fresh
from tests.support.failover.rollback import Rig, same, twin
from tests.support.marks import long_but

DATA = dataset(48)


def shared(
    script: Callable[[Context], object], settings: Mapping[str, object] | None = None, **options: Any
) -> Outcome:
    """The same job over shared memory; fails where that is not used."""
    with Cluster(transport="shm", **options) as cluster:
        outcome = cluster.train(script, settings)
        assert all(
            worker.context is not None and worker.context.engine.shards.links.near.kind == "shm"
            for worker in cluster.workers
        )
        return outcome


def wide(**options: Any) -> nn.Module:
    """Several pages."""
    return network(hidden=1500, **options)


def partly_frozen() -> nn.Module:
    """The optimizer does not get the first layer."""
    return wide()


def of_second_layer(parameters: Any) -> torch.optim.Optimizer:
    return plain(list(parameters)[2:], lr=0.1)


CASES: dict[str, tuple[Program, dict[str, Any]]] = {
    "one of each": (Program(DATA, 8), {}),
    "several slices": (Program(DATA, 4, model=wide), {"workers": 2, "slices_per_step": 4}),
    "three servers": (
        Program(DATA, 8, model=wide, optimizer=adamw),
        {"workers": 2, "servers": 3, "settings": {"training.chunk_bytes": 16384}},
    ),
    "odd chunks": (
        Program(DATA, 8, model=wide),
        {"workers": 2, "servers": 3, "settings": {"training.chunk_bytes": 832}},
    ),
    "buffers": (Program(DATA, 8, model=partial(network, norm=True)), {"workers": 2, "servers": 2}),
    "frozen": (Program(DATA, 8, model=partly_frozen, optimizer=of_second_layer), {"workers": 2, "servers": 2}),
    "bfloat16": (
        Program(dataset(48, torch.bfloat16), 8, model=partial(wide, dtype=torch.bfloat16)),
        {"workers": 2},
    ),
    "clipped": (
        Program(DATA, 8, model=wide, each=lambda ctx, _: ctx.clip_grad_norm(0.1)),
        {"workers": 2, "servers": 2, "settings": {"training.chunk_bytes": 16384}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str) -> None:
    script, options = CASES[case]
    assert shared(script, **options).digests == train(script, **options).digests


@pytest.mark.parametrize(("chunk_bytes", "in_place"), [(16384, True), (832, False)])
def test_weights_are_used_in_place_where_servers_share_whole_pages(chunk_bytes: int, in_place: bool) -> None:
    seen: list[bool] = []

    def look(ctx: Context, _: int) -> None:
        space = ctx.engine.weights.space
        assert space is not None
        seen.append(space.lent)

    shared(Program(DATA, 8, model=wide, each=look), servers=2, settings={"training.chunk_bytes": chunk_bytes})
    assert set(seen) == {in_place}


def test_a_worker_holds_no_second_copy_of_the_weights() -> None:
    private: list[object] = []

    def look(ctx: Context, slices: int) -> None:
        if slices % 5:  # a look takes as long as ten slices
            return
        gc.collect()
        layout = ctx.engine.shards.links.plan.layout
        spaces = [o for o in gc.get_objects() if type(o) is FlatSpace and o.layout is layout]
        private.extend(space for space in spaces if not space.lent)
        assert any(space is ctx.engine.weights.space for space in spaces)

    shared(Program(DATA, 8, model=wide, epochs=1, each=look))
    assert private == []


def test_three_slots_are_enough_in_step() -> None:
    used: list[int] = []
    with Cluster(workers=2, transport="shm") as cluster:

        def look(ctx: Context, _: int) -> None:
            shard = cluster.job.servers[0].service.first.host.shard
            assert shard is not None
            used.append(max(shard.sharing.used, default=0))

        cluster.train(Program(DATA, 8, model=wide, epochs=5, each=look))
    assert max(used) == 2


@pytest.mark.parametrize(("servers", "staleness"), [(1, 0), (2, 2), (3, "unbounded")])
def test_asynchronous_contributions_count_once(servers: int, staleness: int | str) -> None:
    program = LedgerProgram(samples=60, batch_size=3, epochs=3)
    outcome = shared(
        program,
        workers=3,
        servers=servers,
        mode="async",
        staleness=staleness,
        settings={"training.chunk_bytes": 64},
    )
    assert torch.equal(outcome.tensor("cells"), torch.full((60,), 3.0))


def test_whoever_rests_keeps_its_weights_while_others_go_on() -> None:
    kept: list[bool] = []

    with Cluster(workers=2, mode="async", staleness="unbounded", transport="shm") as cluster:

        def rest(ctx: Context, slices: int) -> None:
            if ctx.rank != 0 or slices != 2:
                return
            model = list(model_of(ctx).parameters())
            before = [parameter.detach().clone() for parameter in model]
            version = ctx.version
            until("others are far ahead", lambda: cluster.stats()[0].version >= version + 8)
            kept.append(all(torch.equal(a, b) for a, b in zip(before, model, strict=True)))

        cluster.train(Program(DATA, 2, model=wide, each=rest))
    assert kept == [True]


def test_slots_of_a_worker_that_is_lost_are_used_again() -> None:
    program = Program(DATA, 8, model=wide, epochs=4)
    with Cluster(workers=2, transport="shm", lease_s=0.5, grace_s=0.1) as cluster:

        def vanish(ctx: Context, slices: int) -> None:
            if ctx.rank == 0 and slices == 2:
                cluster.workers[0].cut()

        program.each = vanish
        for _ in range(2):
            cluster.start(program)
        cluster.join(cluster.workers[1:])
        shard = cluster.job.servers[0].service.first.host.shard
        assert shard is not None
        assert len(shard.sharing._attachments) <= 1
        digests = cluster.outcome().digests
    program.each = None
    assert digests == train(program, workers=2).digests


def test_who_attaches_again_and_again_keeps_no_descriptors_open() -> None:
    """A worker whose attempts to attach get no answer; and many that are no workers."""

    def knock(ctx: Context, slices: int) -> None:
        if slices != 2:
            return
        raw = Raw(cluster)
        first = attached(raw)
        for _ in range(20):
            attached(raw)
        until("as few descriptors as after the first time", lambda: open_now() <= first)
        for worker in range(1, STRANGERS):
            attached(raw, worker)
        most = open_now()
        for worker in range(STRANGERS, 2 * STRANGERS):
            attached(raw, worker)
        until("no more than with the last one that was let in", lambda: open_now() <= most)

    with Cluster(workers=1, transport="shm") as cluster:
        cluster.train(Program(DATA, 8, model=wide, each=knock))


def attached(raw: Raw, stranger: int = 0) -> int:
    """Attach as a process that is no worker, and go away; how many descriptors there are afterwards."""
    meeting = Meeting()
    try:
        request = shard_pb2.AttachRequest(
            job=raw.job,
            timeline=raw.timeline,
            worker=raw.worker + stranger,
            layout_digest=raw.layout.digest,
            meeting=meeting.name,
            inbox_bytes=PAGE,
        )
        raw.run(raw.channel.call("Shard.Attach", request, timeout=10.0))
    finally:
        meeting.close()
    return open_now()


def open_now() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


class Idle(nn.Module):
    """The second layer has a gradient in some steps only, and chunks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = network(hidden=1500), fill(nn.Linear(1500, 8, bias=False))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        """Scores of the classes."""
        self.calls += 1
        scores = self.used(x)
        total: Any = torch.sum(next(self.idle.parameters()))
        return scores + total if self.calls % 4 == 0 else scores


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_without_memory_everything_goes_over_the_network(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    reserve, calls = Segment.reserve, []

    def full(self: Segment, start: int, length: int) -> None:
        calls.append(start)
        if len(calls) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(self, start, length)

    monkeypatch.setattr(Segment, "reserve", full)
    script, settings = Program(DATA, 8, model=Idle, optimizer=adamw), {"training.chunk_bytes": 16384}
    assert shared(script, settings).digests == train(script, settings=settings).digests
    assert len(calls) > room


@pytest.mark.parametrize("how", ["in place", "data"])
def test_what_scripts_write_and_put_back_leaves_no_private_pages(how: str) -> None:
    """A page that stayed this process's own would show an old version for ever."""

    def swap(ctx: Context, _: int) -> None:
        for parameter in model_of(ctx).parameters():
            with torch.no_grad():
                place, mine = parameter if how == "in place" else parameter.data, parameter.detach().clone()
                place.zero_()
                place.copy_(mine)

    swapping = shared(Program(DATA, 8, model=wide, each=swap, epochs=4))
    assert swapping.digests == train(Program(DATA, 8, model=wide, epochs=4)).digests


def test_the_model_stays_as_it_is_after_leaving() -> None:
    models: list[tuple[nn.Module, list[torch.Tensor]]] = []

    def script(ctx: Context) -> None:
        made = wide()

        def model() -> nn.Module:
            return made

        Program(DATA, 8, model=model)(ctx)
        models.append((made, [parameter.detach().clone() for parameter in made.parameters()]))

    with Cluster(transport="shm") as cluster:
        outcome = cluster.train(script)
        ((model, before),) = models
        for (name, parameter), value in zip(model.named_parameters(), before, strict=True):
            assert torch.equal(parameter, value)
            assert torch.equal(parameter, outcome.tensor(name))


ON_ANOTHER_HOST = "it is on another host"
IN_ANOTHER_CONTAINER = (
    "it is on this host, but in a container that has no directory in common with this one "
    "(cluster.meeting_dir, there /dev/shm)"
)


@pytest.mark.parametrize(
    ("error", "host", "reason"),
    [
        (FileNotFoundError(2, "No such file"), "another kernel", ON_ANOTHER_HOST),
        (FileNotFoundError(2, "No such file"), meeting.host(), IN_ANOTHER_CONTAINER),
        (PermissionError(13, "Permission denied"), "", "it runs as another user, or may not enter /dev/shm"),
        (OSError(24, "Too many open files"), "", "no memory can be shared with it: [Errno 24] Too many open files"),
    ],
)
def test_a_server_elsewhere_is_reached_over_the_network(
    error: OSError, host: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(*_: Any) -> None:
        raise error

    script = Program(DATA, 8, model=wide)
    wanted = train(script).digests
    monkeypatch.setattr("paramserver.server.versions.sharing.Visit", elsewhere)
    monkeypatch.setattr("paramserver.worker.memory.shared.host", lambda: host)
    with Cluster(transport="auto") as cluster:
        assert cluster.train(script).digests == wanted
        assert {one.context.engine.facts().transport_reason for one in cluster.workers if one.context} == {
            f"server-0: {reason}"
        }
    with (
        Cluster(transport="shm") as cluster,
        pytest.raises(errors.UnavailableError, match=f"(?s)transport = shm.*server-0: {re.escape(reason)}"),
    ):
        cluster.train(script)


@pytest.mark.parametrize(
    "when",
    long_but(
        {"half applied (C05)", "both at once (C03)"},
        ["staged (C01)", "half applied (C05)", "published, not answered (A07)", "both at once (C03)"],
    ),
)
def test_going_back(tmp_path: Path, when: str) -> None:
    with Rig(tmp_path, EVERY, fresh(MOMENTS[when]), cluster__transport="shm") as rig:
        rig.begin(program())
        summary = rig.finish()
        assert rig.rollbacks >= 1
    same(summary, twin("faults", program(), slices_per_step=SLICES))
