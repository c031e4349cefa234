"""Some members share a host, and others do not."""

from __future__ import annotations

from typing import Any

import pytest

from paramserver.core.versions import drafts
from paramserver.server.versions.drafting import Draft, Drafting
from paramserver.worker.gradients import early
from paramserver.worker.memory.shared import SharedMemory
from tests.support.cluster.harness import Cluster, train
from tests.support.cluster.programs import Program, adamw, dataset, network

DATA = dataset(48)
SETTINGS = {"training.chunk_bytes": 832}


def script() -> Program:
    return Program(DATA, 8, 2, lambda: network(hidden=300, norm=True), adamw)


def refuse(monkeypatch: pytest.MonkeyPatch, elsewhere: Any) -> None:
    """Servers and workers for whom ``elsewhere(worker, server)`` holds share no memory."""
    attach = SharedMemory.attach

    async def attach_here(self: SharedMemory, server: int, channel: Any, *about: Any) -> str:
        *_, worker, _ = about
        return "on another host" if elsewhere(worker, server) else await attach(self, server, channel, *about)

    monkeypatch.setattr(SharedMemory, "attach", attach_here)


def kinds(cluster: Cluster) -> set[str]:
    return {worker.context.engine.shards.links.near.kind for worker in cluster.workers if worker.context is not None}


def reasons(cluster: Cluster) -> set[str]:
    return {one.context.engine.facts().transport_reason for one in cluster.workers if one.context is not None}


@pytest.mark.parametrize(("least_bytes", "kind"), [(0, "memory"), (1 << 40, "shm+memory")])
def test_large_models_go_over_the_network_if_not_all_servers_are_near(
    least_bytes: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = train(script(), 2, 2, SETTINGS).digests
    monkeypatch.setattr(early, "LEAST_BYTES", least_bytes)
    refuse(monkeypatch, lambda worker, server: server == 1)
    apart = "" if least_bytes else "not all servers are on its host, and a large model goes over the network; "
    with Cluster(2, 2, transport="auto") as cluster:
        assert cluster.train(script(), SETTINGS).digests == wanted
        assert kinds(cluster) == {kind}
        assert reasons(cluster) == {f"{apart}server-1: on another host"}


def test_what_lies_in_shared_memory_is_in_a_draft_beside_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker is on the server's host, the other one is not."""
    wanted = train(script(), 2, 1, SETTINGS).digests
    taken: list[Draft | None] = []
    take = Drafting.take

    def taking(self: Drafting, *args: Any) -> Draft | None:
        taken.append(take(self, *args))
        return taken[-1]

    monkeypatch.setattr(drafts, "DRAFT_BYTES", 0)
    monkeypatch.setattr(Drafting, "take", taking)
    with monkeypatch.context() as patch:
        refuse(patch, lambda worker, server: worker % 2)
        with Cluster(2, transport="auto") as cluster:
            assert cluster.train(script(), SETTINGS).digests == wanted
            assert kinds(cluster) == {"shm", "memory"}
    assert any(draft is not None for draft in taken)
    taken.clear()
    with Cluster(2, transport="auto") as cluster:
        assert cluster.train(script(), SETTINGS).digests == wanted
        assert kinds(cluster) == {"shm"}
    assert taken
    assert not any(taken), "nothing arrives bit by bit where all share memory"
