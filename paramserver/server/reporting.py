"""Reports of a server about its shard: counters, versions, the workers that it waits for."""

from __future__ import annotations

from paramserver.server.replicas.facts import ledger_of
from paramserver.server.running import RunningShard
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.wire.messages import consistency_to_proto


def report(shard: RunningShard | None) -> shard_pb2.StatsResponse:
    """Counters and the present state."""
    if shard is None:
        return shard_pb2.StatsResponse(waiting_for="the model")
    state, tensors, saver = shard.state, shard.tensors, shard.saver
    missing = state.missing() if state.active else None
    return shard_pb2.StatsResponse(
        version=state.version,
        consistency=consistency_to_proto(state.consistency),
        applied=state.counters.applied,
        duplicate=state.counters.duplicate,
        skipped=tensors.skipped,
        refused=state.counters.refused,
        max_clock_spread=state.pulls.max_spread,
        waiting_for=waiting_for(shard) if state.active else "version 0",
        generation=state.generation,
        timeline=state.timeline,
        clocks=[shard_pb2.WorkerClock(worker=w, clock=c) for w, c in sorted(state.pulls.clocks.items())],
        missing=[types_pb2.Range(start=lo, stop=hi) for lo, hi in missing.slices] if missing else (),
        missing_of=missing.of if missing else 0,
        shard_bytes=sum(chunk.nbytes for chunk in shard.chunks.values()),
        holds=shard.digest,
        active=state.active,
        scheduled=consistency_to_proto(state.changeover.scheduled) if state.changeover.scheduled else None,
        committed=state.changeover.committed,
        copies=saver.statuses() if saver else (),
        checkpoint_pause_s=tensors.copy_s,
        checkpoint_write_s=saver.write_s if saver else 0.0,
        samples=tensors.samples,
        applied_before=state.counters.applied_before,
        shard=shard.config.shard,
        backup=state.backup,
        whole=state.backup and state.active,
        placement=shard.copies.placement,
        backups=shard.copies.backups.statuses(),
    )


def waiting_for(shard: RunningShard) -> str:
    """In words, why the next version does not exist yet; empty if it waits for nothing."""
    if shard.norms.waiting_for or shard.copies.backups.waiting_for:
        return shard.norms.waiting_for or shard.copies.backups.waiting_for
    if shard.state.published.at_stand:
        return "another number of servers"
    if missing := shard.state.missing():
        return str(missing)
    slow = [shard.names.get(worker, f"worker {worker}") for worker in shard.state.pulls.slowest_workers()]
    return f"clock {shard.state.pulls.floor}: {', '.join(slow)}" if slow and shard.state.pulls else ""


def ledger_response(shard: RunningShard) -> shard_pb2.LedgerResponse:
    """The contributions that were counted, and the workers that brought them."""
    return ledger_of(shard.state, shard.names)
