"""A coordinator process: stands by until it leads, leads until the job ends or another one leads."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from paramserver import errors, logs
from paramserver.checkpoint import catalog
from paramserver.checkpoint.owner import Holding
from paramserver.config import FEEDBACK, Settings
from paramserver.coordinator.endpoint import Endpoint
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.leader import Leadership
from paramserver.coordinator.leadership.takeover import take_over, unfinished
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.job.life import Ends, Phase
from paramserver.core.layout.lr_scaling import LrScaling
from paramserver.membership.settings import consistency_of, shared
from paramserver.records.writing import Writing
from paramserver.report.data import Outcome
from paramserver.report.outcome import broken_off, finished, without_training
from paramserver.results.gather import gather
from paramserver.results.verdict import BROKEN, broken_lines, broken_untrained, closing_lines, exit_code
from paramserver.resume.checkpointing import checkpoint_options, find_checkpoint, goes_on_there, split, tracked_as
from paramserver.resume.claiming import keep_up, leave
from paramserver.resume.holding import hold
from paramserver.resume.options import Options
from paramserver.resume.resuming import Resuming
from paramserver.roles.keeping import keep_records
from paramserver.roles.patience import persist, to_the_end
from paramserver.roles.reporting import in_force, write_own
from paramserver.roles.standby import Standby
from paramserver.store.base import Store
from paramserver.transport.base import Channel
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2, types_pb2

log = structlog.get_logger("paramserver.coordinator")

# How long members have to leave when the job has ended.
_LEAVE_S = 15.0
# How long the news that the job has failed has to reach its members.
_TELL_S = 2.0


class Coordinating:
    """One coordinator process.

    ``connect`` makes a channel to the server at an address; ``say`` prints a line for people.
    """

    def __init__(
        self,
        settings: Settings,
        options: Options,
        open_store: Callable[[], Store],
        store_name: str,
        security: Security,
        connect: Callable[[str], Channel],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.endpoint = Endpoint(settings.cluster.job, in_force(settings))
        # The address at which others reach this process; set before `run`.
        self.address = ""
        # The address of the dashboard; empty: there is none.
        self.dashboard = ""
        self.show_end: Callable[[], Coroutine[Any, Any, None]] | None = None  # called at the end, for those who watch
        self._settings = settings
        self._options = options
        self._open_store = open_store
        self._store_name = store_name
        self._security = security
        self._connect = connect
        self._say = say
        self._resuming = Resuming(self.endpoint, settings, connect, store_name)
        self._standby = Standby(self.endpoint, settings, options.standby, self._resuming, store_name, say)
        self._stop = asyncio.Event()
        self._signal = 0
        logs.known_as("coordinator", self._version)

    @property
    def leads(self) -> bool:
        """Whether this coordinator is the one that members talk to."""
        return self.endpoint.service is not None

    def _version(self) -> int | None:
        service = self.endpoint.service
        return service.job.reports.newest_version() if service is not None else None

    def on_signal(self, number: signal.Signals) -> None:
        """Leave the job to another coordinator."""
        self._signal = number
        self._stop.set()

    async def run(self, leading: Callable[[], None]) -> int:
        """Run until the job has ended, or a signal; returns the exit code. ``leading`` is called at each leadership.

        Raises StoreError, ConfigError if the job cannot be led.
        """
        running = asyncio.create_task(self._run(leading))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return 128 + self._signal
        return running.result()

    async def _run(self, leading: Callable[[], None]) -> int:
        stood_by = False
        while True:
            store = self._open_store()
            leadership = Leadership(
                store, self.address, self._settings.cluster.lease_s, self._options.token, self._options.former
            )
            try:
                if self._options.must and not stood_by:
                    await self._resuming.wait(store)
                stood_by = await self._standby.wait(store, leadership, self.address) or stood_by
                code = await self._lead(store, leadership, stood_by, leading)
            finally:
                self.endpoint.service = None
                await to_the_end(_give_back(leadership, store))
            if code is not None:
                return code
            stood_by = True

    # ---- leading

    async def _lead(
        self, store: Store, leadership: Leadership, stood_by: bool, leading: Callable[[], None]
    ) -> int | None:
        """Lead until the job ends; the exit code, or None if another coordinator leads now."""
        journal = await Journal.open(store, self._store_name, leadership.term)
        journal.owns_store = False
        forgets = self._options.fresh and not stood_by
        record = journal.found if forgets else await self._resuming.newest(journal)
        resume = unfinished(record) and (stood_by or not self._options.fresh)
        if stood_by and record is not None and not unfinished(record):
            self._say(f"job {self.endpoint.job} has ended: {record.view.reason}")
            await journal.close()
            return 0
        if resume and not (stood_by or self._options.resume):
            assert record is not None
            go_on = "go on with it with --resume, " if self._options.gather else ""
            raise errors.ConfigError(
                f"job {self._settings.cluster.job!r} has not ended, but the coordinator that led it (at "
                f"{record.address or '?'}) is gone: {go_on}forget it with --fresh, or choose another name with --job"
            )
        holding = await hold(self._settings, self._options, self.address, record if resume else None, stood_by)
        tracked = await asyncio.to_thread(tracked_as, self._settings)
        service = CoordinatorService(self._job_options(holding, tracked), self._connect, journal)
        service.job.address, service.job.dashboard = self.address, self.dashboard
        service.job.confirm, service.job.outranked = leadership.confirm, leadership.outranked
        service.job.forgets = forgets or self._resuming.forgets
        led, writing = False, None
        keeping = asyncio.create_task(keep_up(holding)) if holding is not None else None
        try:
            journal.told = service.job.promises.store_takes
            leadership.keep(journal.verify, service.job.replaced, service.job.promises.store_takes)
            if resume:
                assert record is not None
                await self._take_over(service, record)
                if service.job.over.done() and service.job.over.result() == "replaced":
                    self.endpoint.doing = "was replaced by another one"
                    return None
            elif record is not None and unfinished(record):
                await service.job.begin_again(record)
            else:
                if self._settings.checkpoint.resume:
                    saved = await asyncio.to_thread(find_checkpoint, self._settings.checkpoint.resume)
                    service.job.recovery.resume(
                        saved, "" if goes_on_there(self._settings) else split(self._settings.checkpoint.resume)[0]
                    )
                elif (stood_by or self._options.resume) and holding is not None:
                    if await self._resuming.anybody(holding.unused):
                        return None  # the job goes on from the records of these servers
                    await self._resume_own(service)
                service.job.write_down()
            resumed = bool(self._settings.checkpoint.resume) or self._options.resume
            writing = await keep_records(service.job, self._settings, resumed)
            await service.start()
            led = True
            self.endpoint.service = service
            leading()
            service.job.tasks.begin(self._resuming.watch(service))
            how = await asyncio.shield(service.job.over)
            if how == "found":
                if not (stood_by or self._options.resume):
                    raise self._resuming.refuse()
                self.endpoint.doing = "goes on with the job of which servers hold shards"
                return None
            return await self._conclude(service, how)
        finally:
            # A signal that comes now must not interrupt any of this.
            await to_the_end(self._wind_up(service, led, keeping, writing))

    async def _wind_up(
        self, service: CoordinatorService, led: bool, keeping: asyncio.Task[None] | None, writing: Writing | None
    ) -> None:
        """Show the end to those who watch, and leave in the store only records that another coordinator may need."""
        if self.show_end is not None:
            await self.show_end()
        self.endpoint.service = None
        if not led:
            pass  # the job stays as it was found
        elif not service.job.over.done() and not (self._options.gather and service.job.members_present()):
            # No member has come, or the launcher ends all of them: there is nothing to take over.
            await service.job.conclude(Ends(Phase.STOPPED, "ended by a signal"))
        elif not self._options.gather and service.job.over.result() == "done":
            await service.job.conclude(Ends(Phase.DONE, "done"))
        if led and service.job.ended and service.job.life.released:
            await service.job.journal.forget_model()
        await service.close()
        holding, over = service.job.options.checkpoints.holding, service.job.over
        if keeping is not None and holding is not None:
            keeping.cancel()
            if not (over.done() and over.result() == "replaced"):  # else the other one keeps the place
                # A job that has failed may go on from its checkpoints.
                await leave(holding, service.job.ended and service.job.life.phase is not Phase.FAILED)
        if writing is not None:
            await asyncio.to_thread(writing.close)

    async def _resume_own(self, service: CoordinatorService) -> None:
        """Begin a job that has failed, or is lost, with its own newest checkpoint, if there is one."""
        place = service.job.checkpoints.place
        if place is not None:
            ours = service.job.options.checkpoints.ours
            saved = await asyncio.to_thread(lambda: catalog.newest(place, verify=False, ours=ours))
            if saved is not None:
                log.warning("the job has failed or is lost; it goes on from its newest checkpoint", saved=saved.name)
                service.job.recovery.resume(saved)

    async def _take_over(self, service: CoordinatorService, record: coordinator_pb2.JobRecord) -> None:
        differing = [
            f"{key} is {value} here, the job has {record.settings[key]}"
            for key, value in service.job.options.settings.items()
            if key in record.settings and record.settings[key] != value and key.startswith(("training.", "cluster.job"))
        ]
        if differing:
            raise errors.ConfigError("; ".join(differing) + ": start this coordinator with the settings of the job")
        try:
            self.endpoint.doing = "takes the job over"
            patience_s = max(self._settings.cluster.lease_s, self._settings.cluster.join_timeout_s)
            newcomers, key_of = self.endpoint.newcomers, self.endpoint.key_of
            await persist(
                lambda left_s: take_over(service.job, record, left_s, newcomers, key_of),
                patience_s,
                "taking over did not work at once",
            )
        except errors.FencedError as error:
            await service.job.replaced(str(error))
        except errors.JobFailedError as error:
            if record.ready:  # there were versions, and they are lost
                await service.job.fail(f"{error}; begin it again with --fresh")
                return
            log.warning("what an earlier coordinator has left is lost; the job begins again", reason=str(error))
            await service.job.begin_again(record)
            await self._resume_own(service)
        finally:
            self._resuming.floor = max(self._resuming.floor, service.job.known_term)

    def _job_options(self, holding: Holding | None, tracked: str) -> JobOptions:
        cluster, training = self._settings.cluster, self._settings.training
        return JobOptions(
            job=cluster.job,
            servers=cluster.servers,
            workers=0 if self._settings.run.ddp else cluster.workers,  # ranks are no members of the job
            consistency=consistency_of(self._settings.consistency.mode, self._settings.consistency.staleness),
            slices_per_step=training.slices_per_step or int(self._settings.run.ddp),
            seed=training.seed,
            lease_s=cluster.lease_s,
            stall_s=cluster.stall_s,
            call_timeout_s=cluster.join_timeout_s,
            placement=cluster.placement,
            link_mbps=cluster.link_mbps,
            replicas=self._settings.replicas(launched=not self._options.gather),
            repair_mbps=cluster.repair_mbps or cluster.link_mbps / 2,
            max_model_bytes=cluster.max_model_bytes,
            join_timeout_s=cluster.join_timeout_s if self._options.gather else 0.0,
            max_idle_s=cluster.max_idle_s,
            settings=shared(self._settings),
            checkpoints=checkpoint_options(self._settings, holding, tracked, launched=not self._options.gather),
            residuals=training.push_compression in FEEDBACK,
            sync_batchnorm=training.sync_batchnorm,
            poison=training.poison,
            lr_scaling=LrScaling(*self._settings.lr_rule, training.lr_warmup_steps),
            launched=not self._options.gather,
            security="tls" if self._security.tls else "insecure" if self._security.insecure else "plain",
        )

    # ---- the end

    async def _conclude(self, service: CoordinatorService, how: str) -> int | None:
        if how == "replaced":
            self.endpoint.doing = "was replaced by another one"
            return None
        if not self._options.gather:
            await self._stop.wait()
            return 128 + self._signal  # the launcher has gathered the result
        if how == "failed":
            await service.job.changes.wait_until(lambda: not service.job.members_present(), _TELL_S)
            self._say(f"paramserver: error: {service.job.reason}")
            how_so = broken_off(service.job.life.exit_code, service.job.reason)
            line, _ = await self._report(service, how_so)  # the code is not 0 already
            self._say_all([line])
            service.job.ending.say(Phase.FAILED, [service.job.reason, line])
            return service.job.life.exit_code
        if how == "stopped":
            await service.job.changes.wait_until(lambda: not service.job.worker_infos(), _LEAVE_S)
        code = await self._gather(service, how)
        if self._settings.cluster.when_done == "stay" and code == 0:
            await self._stop.wait()
        await service.job.changes.wait_until(lambda: not service.job.members_present(), _LEAVE_S)
        return code

    async def _gather(self, service: CoordinatorService, how: str) -> int:
        """Gather the result and let the servers go. A server that dies meanwhile is replaced first."""

        def all_there() -> bool:
            going_back = service.job.seats.away or service.job.recovery.under_way
            return not (going_back or service.job.ending.closing) or service.job.life.exit_code != 0

        limit_s = self._settings.cluster.max_idle_s

        async def attempt(_: float) -> int:
            await service.job.changes.wait_until(all_there, limit_s)
            return service.job.life.exit_code or await self._gather_now(service, how)

        try:
            return await persist(attempt, limit_s, "the result cannot be gathered yet")
        except errors.ParamServerError as error:
            reason = f"the result could not be gathered: {error}"
            self._say(f"paramserver: error: {reason}")
            service.job.ending.say(Phase.FAILED, [reason])
            await service.job.conclude(Ends(Phase.FAILED, reason, exit_code=error.exit_code))
            return error.exit_code

    async def _gather_now(self, service: CoordinatorService, how: str) -> int:
        status = await service.status(coordinator_pb2.StatusRequest(model=True))
        if not (status.HasField("model") and service.job.registry.ready):
            self._say(ended := "the job has ended without training")
            broken = broken_untrained(self._settings.run)
            line, unwritten = await self._report(service, without_training(broken))
            self._say_all([line, *broken_lines(broken)])
            code = unwritten or (BROKEN if broken else 0)
            service.job.ending.say(Phase.FAILED if code else Phase.STOPPED, [ended, line, *broken_lines(broken)])
            await service.job.conclude(Ends(Phase.STOPPED, "ended without training", exit_code=code))
            return code
        run, directory = self._settings.run, self._settings.checkpoint.place

        async def look() -> types_pb2.View:
            return service.job.view()

        summary = await gather(status, self._connect, look, run, None, directory)
        code = exit_code(summary)
        *lines, last = closing_lines(status, summary)
        line, unwritten = await self._report(service, finished(summary, code), summary)
        # Without the report it is not true that everything promised is there.
        said = [*lines, line] if unwritten else [*lines, line, last]
        self._say_all(said)
        phase, reason = Phase.DONE, lines[0]
        if summary["broken_promises"]:
            phase, reason = Phase.FAILED, summary["broken_promises"][0]
        elif unwritten:
            phase, reason, code = Phase.FAILED, "the report cannot be written", unwritten
        elif how == "stopped":
            phase, reason = Phase.STOPPED, service.job.reason
        service.job.ending.say(phase, said)
        await service.job.conclude(Ends(phase, reason, json.dumps(summary), exit_code=code))
        return code

    async def _report(
        self, service: CoordinatorService, how: Outcome, summary: Mapping[str, Any] | None = None
    ) -> tuple[str, int]:
        """Write the report, if one is wanted: a line for people, and an exit code other than 0 if there is none."""
        try:
            return await write_own(self.endpoint, service, self._settings, how, summary), 0
        except errors.UserError as error:
            return f"paramserver: error: {error}", error.exit_code

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in filter(None, lines):
            self._say(line)


async def _give_back(leadership: Leadership, store: Store) -> None:
    await leadership.resign()
    await store.close()
