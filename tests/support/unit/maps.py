"""All maps and lists that live in a coordinator, a server or a keeper of a host, and what bounds each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "paramserver"
FOLDERS = (*("coordinator", "server", "checkpoint", "transport", "worker/host", "core", "web", "membership", "resume"),)
_KINDS = {"dict", "set", "list", "deque", "defaultdict", "OrderedDict", "Counter", "bytearray", "WeakSet"}


def reasons() -> dict[str, str]:
    """What bounds the maps under each word of ``OTHERS``."""
    return {
        "call": "an entry for each call under way, of which a process has 8192 at most; it goes with the call",
        "connection": "an entry for each connection or what lies in its buffers, see paramserver/transport/limits.py",
        "fixed": "a number of entries that stands beside the map in the code",
        "job": "grows with the job's own epochs or rows, which are counted once each, and merged",
        "member": "an entry for each member, of which there are 4096 of a role at most; it goes with the member",
        "model": "an entry for each chunk, tensor, slot or kept version of the model, which has limits",
        "name": "an entry for each name of a member, and names end with a number below 4096",
        "own": "filled by this process, its settings, its operator or its own script",
        "shard": "an entry for each server or shard, of which there are 4096 at most",
        "version": "an entry for each version that is being copied or is a checkpoint; older ones go",
    }


def found_maps() -> Iterator[str]:
    """Attributes that begin as an empty map or list: "module:Class.attribute"."""
    seen = set()
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            for made in ast.walk(ast.parse(path.read_text())):
                if isinstance(made, ast.ClassDef):
                    seen |= {f"{module}:{made.name}.{name}" for name in _attributes(made)}
    yield from seen


def _attributes(made: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(made):
        pairs: list[tuple[ast.expr, ast.expr]]
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
        else:
            continue
        for target, value in pairs:
            if not _is_map(value):
                continue
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr
            elif isinstance(target, ast.Name) and node in made.body:
                yield target.id


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _is_map(value: ast.expr) -> bool:
    """Whether this makes a map, set, list or buffer that is filled later."""
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    if isinstance(value, ast.Tuple):
        return any(map(_is_map, value.elts))
    if not isinstance(value, ast.Call):
        return False
    name = _name(value.func)
    if name == "field":
        return any(one.arg == "default_factory" and _name(one.value) in _KINDS for one in value.keywords)
    return name in _KINDS


def _name(made: ast.expr) -> str:
    inner = made.value if isinstance(made, ast.Subscript) else made
    if isinstance(inner, ast.Name):
        return inner.id
    return inner.attr if isinstance(inner, ast.Attribute) else ""


# By map that peers fill with keys or contents of their choice: the test that fills it.
_TESTS = {
    "unit/test_bounded.py::test_a_state_that_a_departed_worker_has_begun_to_bring_goes": """
        coordinator.work.registered:_State.data
    """,
    "unit/test_bounded_servers.py::test_a_worker_holds_so_many_slices_and_no_more": """
        core.work.leases:SliceLeases._done core.work.leases:SliceLeases._fresh core.work.leases:SliceLeases._held_by
        core.work.leases:SliceLeases._held_of core.work.leases:SliceLeases._holder
        core.work.leases:SliceLeases._returned
    """,
    "unit/test_bounded.py::test_a_worker_that_registers_again_and_again_is_registered_once": """
        coordinator.model:ModelRegistry.registered
    """,
    "unit/test_bounded_servers.py::test_audited_slices_are_kept_within_limits": """
        core.versions.audits:Comparison._open core.versions.audits:Comparison.unlike
    """,
    "unit/test_bounded.py::test_batches_that_are_leased_and_never_done_have_a_limit": """
        coordinator.work.evaluating:Evaluating._all core.job.dealing:Evaluation._free
        core.job.dealing:Evaluation._leased core.job.dealing:Evaluation._results
    """,
    "unit/test_bounded_servers.py::test_bulk_tokens_have_a_limit": """
        transport.bulk.server:BulkServer._tickets
    """,
    "unit/test_bounded.py::test_closed_steps_are_remembered_within_limits": """
        core.records.steps:Collector._closed core.records.steps:Collector._next
    """,
    "unit/test_bounded.py::test_curves_have_a_limit": """
        core.records.history:History._curves
    """,
    "unit/test_bounded.py::test_deaths_and_slices_that_are_skipped_have_a_limit": """
        coordinator.watching.poison:PoisonWatch.slices core.work.poison:Poison._deaths
    """,
    "unit/test_bounded.py::test_ends_of_epochs_have_a_limit": """
        coordinator.history.best:BestCheckpoints._ends
    """,
    "unit/test_bounded.py::test_fake_joins_do_not_keep_servers_from_being_found": """
        coordinator.endpoint:Endpoint._knocks
    """,
    "unit/test_bounded_servers.py::test_groups_and_their_numbers_have_a_limit": """
        core.collectives.rounds:Rounds._groups core.collectives.rounds:_Group.done
        core.collectives.rounds:_Group.left core.collectives.rounds:_Group.names
    """,
    "unit/test_bounded_servers.py::test_names_of_counted_pushes_have_a_limit": """
        server.versions.repetitions:Repetitions._counted
    """,
    "unit/test_bounded.py::test_names_of_values_have_room_for_each_worker_and_for_the_job": """
        core.records.steps:_Names._known core.records.steps:_Names._of
    """,
    "unit/test_bounded.py::test_numbers_to_agree_on_have_room_together": """
        coordinator.work.agreeing:Agreeing._messages coordinator.work.agreeing:Agreeing._values
    """,
    "unit/test_bounded.py::test_parts_of_a_trace_that_nobody_fetches_have_a_limit": """
        coordinator.watching.tracing:Tracing._parts
    """,
    "unit/test_bounded_servers.py::test_pulls_that_are_gone_leave_nothing": """
        core.shards.pulls:Pulls._for_version
    """,
    "unit/test_bounded_servers.py::test_rounds_for_which_nobody_waits_make_room": """
        core.collectives.rounds:Rounds._rounds core.collectives.rounds:_Round.came
        server.collectives.collecting:Collecting._open server.collectives.collecting:_Open.given
    """,
    "unit/test_bounded.py::test_servers_of_other_jobs_are_forgotten": """
        resume.resuming:Resuming._others
    """,
    "unit/test_bounded.py::test_steps_that_servers_make_up_are_judged_or_dropped": """
        core.blame.judge:Judge._holds core.blame.judge:Judge._pending
    """,
    "unit/test_bounded.py::test_values_of_open_steps_have_a_limit": """
        core.records.steps:Collector._open core.records.steps:_Open.values
    """,
    "unit/test_bounded.py::test_versions_that_are_written_have_a_limit": """
        coordinator.history.overdue:Overdue._begun core.procedures.checkpointing:Checkpointing._again
        core.procedures.checkpointing:Checkpointing._parts core.procedures.checkpointing:Checkpointing._states
    """,
    "unit/test_bounded.py::test_waits_that_servers_make_up_are_kept_for_some_pairs_only": """
        coordinator.watching.blame:BlameWatch._counted coordinator.watching.blame:BlameWatch._held
    """,
    "unit/test_bounded_servers.py::test_workers_at_the_bound_have_a_limit": """
        server.times:Times._bound
    """,
    "unit/test_bounded_servers.py::test_workers_that_ask_for_slices_have_a_limit": """
        core.work.stealing:_Step.asked core.work.stealing:_Step.attempts
    """,
    "unit/test_departed.py::test_joining_and_leaving_does_not_bloat_the_record": """
        coordinator.reports:Reports._departed
    """,
    "unit/test_departed.py::test_members_of_a_role_have_a_limit": """
        core.job.membership:Membership._members
    """,
    "unit/test_ending.py::test_many_that_have_left_are_kept_as_a_sum": """
        coordinator.watching.ending:Ending._gone
    """,
    "unit/test_ledger.py::test_asynchronous_details_are_bounded_too": """
        core.versions.ledger:Ledger._rows
    """,
    "unit/test_records.py::test_a_curve_is_bounded_and_keeps_its_ends": """
        core.records.history:_Curve.points
    """,
    "unit/test_web_access.py::test_spent_tickets_are_bounded": """
        web.access:Access._spent
    """,
    "unit/test_crowd.py::test_there_are_never_more_than_the_limit_and_never_two_answers": """
        core.crowd:Crowd._at core.crowd:Crowd._of
    """,
    "unit/test_dialling.py::test_callers_that_name_foreign_addresses_are_remembered_up_to_a_limit": """
        coordinator.leadership.dialling:Dialling._failures
    """,
    "unit/test_web_api.py::test_series_have_a_hole_where_a_value_is_no_number_and_a_limit_of_names": """
        web.history:History._names
    """,
    "unit/test_bounded_servers.py::test_pieces_of_a_state_are_no_more_than_the_state": """
        server.saving.brought:BroughtState._entries server.saving.brought:BroughtState._seen
        server.saving.brought:BroughtState._taken
    """,
}
FILLED = {name: test for test, names in _TESTS.items() for name in names.split()}

# All others, by the reason why they do not grow (see `reasons`).
OTHERS = {
    "call": """
        coordinator.tasks:Tasks._running core.layout.host_weights:HostWeights._readers
        core.layout.host_weights:HostWeights._waiting core.shards.pulls:Pulls._fresh core.shards.pulls:Pulls._parked
        core.shards.pushes:Pushes._brought core.shards.pushes:Pushes._waiting
        core.versions.consistency:PerContribution._queue core.versions.consistency:PerStep._buffers
        core.versions.drafts:DraftState._covered core.versions.drafts:DraftState._lacking
        core.versions.drafts:DraftState._lacks core.versions.drafts:DraftState._parts
        core.versions.host_sums:HostSums._pieces core.versions.host_sums:HostSums._workers
        core.versions.reduction:Reducer._held core.work.stealing:_Step.taken core.work.unpublished:Unpublished._kept
        core.work.unpublished:_Kept.shards server.arithmetic.norms:NormExchange._tasks
        server.collectives.collecting:Collecting._tasks server.replicas.backup:Backup.tasks
        server.replicas.backup:Backup.waiting server.replicas.backups:Backups._closing
        server.replicas.copies:Copies.ahead server.replicas.parcels:DraftParcel.sent
        server.running:RunningShard._tasks server.running:RunningShard.buffers server.times:Times._came
        server.traced:ShardTrace._came server.versions.acks:Acks._listeners server.versions.acks:Acks._present
        server.versions.ahead:Ahead._sent server.versions.calls:Calls._waiting
        server.versions.drafting:Drafting._parts server.versions.drafting:Drafting._tasks
        server.versions.drafting:Drafting.listeners server.versions.repetitions:Repetitions._pushing
        transport.bulk.movers:Movers._waiting transport.bulk.server:BulkServer._tasks
        transport.grpc.channel:_Call._waiting transport.grpc.channel:_Call._woken transport.grpc.channel:_Wire.calls
        transport.memory:MemoryChannel._calls transport.memory:MemoryServer._running transport.memory:_Pipe._items
        transport.shm.channel:Asking._waiting transport.shm.channel:LocalServer._tasks
        worker.host.keeper:Keeper._answers worker.host.keeper:Keeper._offered worker.host.keeper:Keeper._spaces
        worker.host.keeper:Keeper._tasks worker.host.sums:Sums._answers worker.host.sums:Sums._free
        worker.host.sums:Sums._lent worker.host.sums:Sums._parts worker.host.sums:Sums._tasks
        worker.host.tier:HostTier._again worker.host.tier:HostTier._pushed worker.host.tier:HostTier.reading
    """,
    "connection": """
        worker.host.keeper:Keeper._readers server.versions.sharing:_Attachment.lines
        transport.bulk.channel:BulkChannel._idle transport.bulk.channel:BulkChannel._open
        transport.bulk.line:Line._come transport.bulk.line:Line._going transport.bulk.line:Line._leaving
        transport.bulk.reading:Reader._head_room transport.bulk.reading:Reader._header
        transport.bulk.server:BulkServer._listening transport.entrance:Entrance._listening
        transport.entrance:Entrance._strangers transport.grpc.watch:Watch._known transport.grpc.watch:Watch._seen
        transport.direct:DirectLine._come
        transport.grpc.channel:GrpcChannel._closing transport.grpc.channel:GrpcChannel._retired
        transport.grpc.channel:_Wire._multicallables transport.memory:MemoryNetwork._servers
        transport.shm.channel:Line._come transport.shm.channel:Line._going transport.shm.seat:Seat._connections
    """,
    "fixed": """
        worker.host.reader:Reader._offers worker.host.reader:Reader._open
        coordinator.watching.blame:BlameWatch._deals coordinator.watching.ending:Ending.said
        core.blame.bound:AtBound._waits core.blame.judge:Judge._many core.blame.judge:Judge._usual
        core.blame.judge:Judge.worst core.job.events:Events._newest core.job.watchdog:Watchdog._intervals
        core.records.moments:Moments._kept core.work.speed:Speed._lost core.work.speed:Speed._pushes
        core.work.speed:Speed._steps core.work.speed:Speed._works membership.pulse:Pulse._losses
        server.arithmetic.norms:NormExchange._told server.times:Times._done server.times:Times._holds
        server.traced:ShardTrace._made_of server.traced:ShardTrace._waited_for web.feed:Feed._events
    """,
    "job": """
        core.shards.shard:ShardState._forwarded core.versions.events:Forwarded.clocks
        core.versions.ledger:Account.slices core.versions.ledger:Account.workers
        core.versions.counted:Counted._ends core.versions.counted:Counted._firsts
        core.versions.counted:Counted._slices core.versions.ranges:RangeSet._starts
        core.versions.ranges:RangeSet._stops
    """,
    "member": """
        transport.security.members:ServerRoll._members transport.security.members:ServerRoll._roles
        server.versions.sharing:Sharing._attachments coordinator.job:Job.draining coordinator.job:Job.moving
        coordinator.job:Job.restarting coordinator.leadership.cluster:Servers._channels
        coordinator.leadership.keeping:Keeping._tasks coordinator.leadership.keeping:Keeping._told
        coordinator.leadership.takeover:_TakingOver._stats coordinator.reports:Reports._farewells
        coordinator.reports:Reports.servers coordinator.reports:Reports.workers
        coordinator.rpc.sessions:Sessions._looking coordinator.watching.blame:BlameWatch._doing
        coordinator.watching.blame:BlameWatch._gone coordinator.watching.blame:BlameWatch._records
        coordinator.watching.ending:Ending._reports coordinator.watching.records:Records._places
        coordinator.work.leasing:Leasing._revisions core.blame.judge:_Evidence._read
        core.job.progress:Progress._seen core.records.rates:Rates._seen core.shards.clocks:Clocks._at
        core.shards.clocks:Clocks.of core.trace.roll:Roll._begun core.trace.roll:Roll._ended
        core.trace.roll:Roll._why core.work.loading:Agreement.called core.work.poison:Poison._at
        core.work.poison:Poison._told
    """,
    "model": """
        checkpoint.contents:Contents._all checkpoint.contents:Contents._masters checkpoint.contents:Contents._shards
        checkpoint.contents:Contents._states checkpoint.contents:Contents.weights core.layout.hypers:Rule.extents
        core.layout.slots:Slots._dropped core.layout.slots:Slots._readers core.layout.slots:Slots._useless
        core.layout.slots:Slots._versions server.arithmetic.apply:ChunkState._arrays
        server.arithmetic.combine:Scratch._flat server.arithmetic.combine:Scratch._tiles
        server.arithmetic.hypers:Hyperparameters._last server.arithmetic.state:StateCopy._copies
        server.arithmetic.state:StateCopy._used server.arithmetic.whole:WholeState._states
        server.making:Maker._spare server.replicas.backup:Backup.has server.replicas.filling:_Part.states
        server.replicas.filling:_Part.weights server.replicas.lent:Lent._views server.replicas.outbox:Content.chunks
        server.replicas.parts:Parts.parts server.running:RunningShard.versions server.running:Staged.states
        server.saving.statecopies:StateCopies._wanted server.times:Times._stale
        server.versions.drafting:Draft.finite server.versions.drafting:Draft.frames
        server.versions.drafting:Draft.made server.versions.drafting:Draft.order
        server.versions.sharing:Sharing._places server.versions.sharing:Sharing._reserved
        server.versions.sharing:_Attachment.views server.versions.version:Version._frames
        server.versions.version:Version.tensors
    """,
    "name": """
        coordinator.reports:Reports._missed coordinator.reports:Reports.lost coordinator.watching.idle:Idle.ever
        core.job.events:Facts.gone core.job.events:Facts.members
    """,
    "own": """
        coordinator.leadership.journal:Journal._revisions coordinator.leadership.journal:Journal._wanted
        coordinator.leadership.journal:Journal._written coordinator.options:JobOptions.settings
        coordinator.promises:Promises.broken coordinator.promises:Promises.troubles core.trace.spans:Span.notes
        core.versions.advances:Advancing._calls core.work.passes:Passes.calls
        core.work.sync_worker:SyncWorkerState._audits core.work.sync_worker:SyncWorkerState._done
        core.work.sync_worker:SyncWorkerState._held core.work.sync_worker:SyncWorkerState._left
        server.rpc.process:Process._at_the_end web.metrics.telemetry:Telemetry._samples
    """,
    "shard": """
        coordinator.leadership.finding:Found.answered coordinator.leadership.finding:Found.ours
        coordinator.watching.blame:BlameWatch._open coordinator.watching.blame:BlameWatch._staleness
        core.blame.judge:Judge._making core.blame.judge:Judge._servers core.job.seats:Seats._away
        core.procedures.placing:Placing._servers core.procedures.placing:_Server.ready
        core.procedures.rollback:Rollback.bad core.procedures.takeover:Takeover._told
        core.work.stealing:Stealing._owners server.arithmetic.norms:NormExchange._heard
        server.arithmetic.norms:NormExchange._peers server.replicas.backups:Backups._at_rest
        server.replicas.backups:Backups._backups server.replicas.backups:Backups._feeds
        server.saving.saver:Saver._channels server.service:ServerService.shards
    """,
    "version": """
        coordinator.history.choosing:Choosing.found coordinator.history.sweeping:Sweep._begun
        coordinator.work.registered:Registered._named coordinator.work.registered:Registered._saved
        core.records.best:Best._awaited core.records.best:Best._saved core.records.best:Best._values
        core.versions.cuts:Cut.only core.versions.cuts:Marks._by_version server.saving.saver:Saver._ahead
        server.saving.saver:Saver._copies server.saving.saver:Saver._left server.saving.saver:Saver._named
        server.saving.saver:Saver._skipped
    """,
}
