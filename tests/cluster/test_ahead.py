"""Versions that are made and sent while gradients still arrive: the same bits, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.core.versions import drafts
from paramserver.server.replicas.parcels import DraftParcel, ForwardParcel
from paramserver.server.running import RunningShard
from paramserver.server.versions.drafting import Drafting
from tests.support.cluster.harness import train
from tests.support.cluster.programs import Program, adamw, dataset, network, plain
from tests.support.cluster.small_job import BAD_STREAMS, SLICES, Death, calm, calm_over, program
from tests.support.failover.moments import EVERY, MOMENTS, fresh
from tests.support.failover.rollback import Rig, Strike, same, twin

DATA = dataset(48)


class Seen:
    """What became of all drafts of a test."""

    def __init__(self) -> None:
        self.all: list[Drafting] = []

    @property
    def adopted(self) -> int:
        return sum(one.adopted for one in self.all)

    @property
    def forgotten(self) -> int:
        return sum(one.forgotten for one in self.all)


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Small shards are drafted, too; at least one draft became a version."""
    found = Seen()
    real = Drafting.__init__

    def init(self: Drafting, *args: Any) -> None:
        real(self, *args)
        found.all.append(self)

    monkeypatch.setattr(drafts, "DRAFT_BYTES", 0)
    monkeypatch.setattr(Drafting, "__init__", init)
    yield found
    assert found.adopted > 0


@pytest.mark.parametrize("optimizer", [plain, adamw])
def test_same_bits(optimizer: Any, monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    script = Program(DATA, 8, 2, lambda: network(hidden=300, norm=True), optimizer)
    options: dict[str, Any] = {"workers": 2, "servers": 2, "settings": {"training.chunk_bytes": 832}}
    digests = train(script, **options).digests
    drafts_of_all = seen.adopted + seen.forgotten
    assert drafts_of_all >= 2 * 2 * 3, "each server drafts each step, if not all drafts are adopted"
    monkeypatch.setattr(drafts, "DRAFT_BYTES", 1 << 40)
    assert train(script, **options).digests == digests
    assert seen.adopted + seen.forgotten == drafts_of_all


@pytest.mark.parametrize(("push", "pull"), [("int8", "bf16"), ("topk", "fp32"), ("none", "fp16")])
def test_same_bits_in_fewer_bytes(push: str, pull: str, monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    """Drafts are made of what was decoded, and sent in the form that was asked for."""
    script = Program(DATA, 8, 2, lambda: network(hidden=300, norm=True))
    form = {"training.push_compression": push, "training.pull_precision": pull, "training.chunk_bytes": 832}
    options: dict[str, Any] = {"workers": 2, "servers": 2, "settings": form}
    digests = train(script, **options).digests
    assert seen.adopted >= 2 * 2
    monkeypatch.setattr(drafts, "DRAFT_BYTES", 1 << 40)
    assert train(script, **options).digests == digests


def test_a_clipped_step_is_not_drafted(seen: Seen) -> None:
    """One worker: with several, a slow machine decides who computes how many slices, and so which are clipped."""
    script = Program(DATA, 8, 1, each=lambda ctx, number: ctx.clip_grad_norm(0.1) if number else None)
    outcome = train(script, 1, 1)
    assert outcome.summary["steps"] == 6
    assert (seen.adopted, seen.forgotten) == (1, 0)


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_over_a_bad_network(name: str, seen: Seen) -> None:
    calm_over(BAD_STREAMS[name], 3, settings={"training.chunk_bytes": 832})


def test_a_worker_dies_in_the_middle_of_a_step(seen: Seen) -> None:
    death = Death(1)
    calm(train(program(death), 3, 2, slices_per_step=SLICES, grace_s=0.1))
    assert death.died


@pytest.mark.parametrize("when", ["staged (C01)", "published, not answered (A07)"])
def test_going_back(tmp_path: Path, when: str) -> None:
    with Rig(tmp_path, EVERY, fresh(MOMENTS[when])) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert rig.rollbacks >= 1
    same(summary, twin("faults", program(), slices_per_step=SLICES))


WIDE = Program(DATA, 4, 2, lambda: network(hidden=300, norm=True), adamw)


class Sent:
    """The chunks that backups were sent, with drafts and with versions. ``lose``: what becomes of drafts on the way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lose: bool) -> None:
        self.ahead: list[int] = []
        self.open: list[DraftParcel] = []
        self.later: list[int] = []
        forward, draft = ForwardParcel.send, DraftParcel.send

        async def send_draft(one: DraftParcel, *how: Any) -> None:
            if lose:  # the backup never gets it, and the primary believes that it has
                one.sent.update(one.content.chunks if one.content is not None else ())
                return
            await draft(one, *how)
            self.open.remove(one)
            self.ahead.append(len(one.sent))

        async def send_version(one: ForwardParcel, *how: Any) -> None:
            await forward(one, *how)
            self.later.append(one.nbytes)

        push, init = RunningShard.push, DraftParcel.__init__

        def begun(one: DraftParcel, *about: Any) -> None:
            init(one, *about)
            self.open.append(one)

        async def late(shard: RunningShard, *what: Any) -> Any:
            """Small contributions come in one message; so the decision waits until something was sent ahead."""
            began = time.monotonic()
            while any(not one.sent for one in self.open) and time.monotonic() < began + 0.2:
                await asyncio.sleep(0.001)
            return await push(shard, *what)

        monkeypatch.setattr(RunningShard, "push", late)
        if not lose:
            monkeypatch.setattr(DraftParcel, "__init__", begun)
        monkeypatch.setattr(DraftParcel, "send", send_draft)
        monkeypatch.setattr(ForwardParcel, "send", send_version)


@pytest.mark.parametrize("lose", [False, True], ids=["arrives", "is lost"])
def test_what_a_draft_is_made_of_goes_to_backups_ahead(
    lose: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = twin("wide", WIDE, slices_per_step=SLICES)
    sent = Sent(monkeypatch, lose)
    with Rig(tmp_path, 0, [], cluster__replicas=1) as rig:
        rig.begin(WIDE)
        same(rig.finish(), wanted)
    assert sent.later
    assert any(sent.ahead) != lose


@pytest.mark.parametrize("at", ["forward.before", "forward.received", "commit.before_log"])
def test_a_server_with_drafts_at_its_backup_dies(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = twin("wide", WIDE, slices_per_step=SLICES)
    sent = Sent(monkeypatch, lose=False)
    with Rig(tmp_path, 0, [Strike(at, "server-1", 4)], cluster__replicas=1) as rig:
        rig.begin(WIDE)
        same(rig.finish(), wanted)
        assert rig.rollbacks == 0
    assert any(sent.ahead)
