"""A worker: its parts, how it joins and how it leaves."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import structlog

from paramserver import errors
from paramserver.compress.casts import Cast
from paramserver.compress.options import Wire
from paramserver.core.versions.consistency import Mode
from paramserver.membership.joining import JoinOptions
from paramserver.transport.base import Channel
from paramserver.transport.shm.seat import host_word
from paramserver.v1 import coordinator_pb2
from paramserver.worker.background import Background
from paramserver.worker.engine.agreeing import Agreeing
from paramserver.worker.engine.entry import Entry
from paramserver.worker.engine.evaluating import Evaluating
from paramserver.worker.engine.loading import Loading
from paramserver.worker.engine.loop import Loop
from paramserver.worker.engine.reading import Reading
from paramserver.worker.engine.rollback import Rollback
from paramserver.worker.engine.summing import Summing
from paramserver.worker.gradients.sender import Sender
from paramserver.worker.job.audited import Audited
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.progress import Progress
from paramserver.worker.job.records import Records
from paramserver.worker.job.shards import Connect, Shards
from paramserver.worker.job.slices import Slices
from paramserver.worker.memory.places import Places
from paramserver.worker.pace import Paces
from paramserver.worker.weights.weights import Weights

log = structlog.get_logger("paramserver.worker")

_LEAVE_S = 2.0


class Engine:
    """One worker of a job; each part owns what it changes, and knows only the parts above it in the list below.

    ``connect`` opens a channel to a server's address, ``coordinator`` is the one to the coordinator; ``background`` is
    the loop in which the network runs. ``transport``, ``host_secret``: see `Shards`.
    Use: :meth:`join`, ``entry.register``, then ``loop.next_item`` and ``loop.contribute`` in turn, :meth:`close`.
    """

    def __init__(
        self,
        background: Background,
        connect: Connect,
        coordinator: Channel,
        options: JoinOptions,
        wait_timeout_s: float = 600.0,
        transport: str = "grpc",
        host_secret: str | None = None,
    ) -> None:
        self.background = background
        if host_secret is not None:
            options = replace(options, host=host_word(host_secret))
        # Parts that know of the job.
        self.progress = progress = Progress()
        self.records = Records()
        self.audited = Audited()
        self.member = member = Member(background, coordinator, options, self._report, wait_timeout_s)
        self.modes = modes = Modes(member)
        self.shards = shards = Shards(member, connect, transport, host_secret)
        self.slices = slices = Slices(member, modes, shards)
        # Parts that act.
        self.places = places = Places()
        self.weights = weights = Weights(member, modes, shards, places)
        self.sender = sender = Sender(member, shards, slices, places, weights)
        self.entry = Entry(member, shards, weights, sender, progress)
        self.paces = paces = Paces(member, modes, shards, slices, weights, sender, self.audited)
        self.rollback = Rollback(member, modes, shards, slices, weights, sender, self.entry, paces)
        self.reading = Reading(member, modes, shards, weights, self.rollback)
        self.agreeing = Agreeing(member, shards, weights, self.rollback)
        self.evaluating = Evaluating(member, shards, self.rollback)
        self.loading = Loading(member, shards, progress, weights, paces, self.rollback)
        self.summing = summing = Summing(member, shards, paces)
        self.loop = Loop(member, modes, shards, slices, progress, weights, sender, paces, self.rollback, summing)

    # ---- beginning and end

    def configure(self, wire: Wire, rounding: Cast | None) -> None:
        """Before there is a model: how gradients travel, and what weights are rounded to on their way here."""
        self.sender.compress(wire)
        self.shards.round_to(rounding)

    def slices_of_update(self) -> int:
        """How many slices the next update has: those of a step, and one in asynchronous mode."""
        return self.member.session.view.slices_per_step if self.modes.present.mode is Mode.SYNC else 1

    def join(self) -> None:
        """Become a member of the job; raises the coordinator's refusal."""
        self.member.join()

    def close(self, ended: bool = False) -> None:
        """Hand in all contributions and leave. Does not stop the background loop.

        ``ended``: the script has come to its end without an error.

        The coordinator must hear that the script has done all its epochs: waits up to ``join_timeout_s`` for one.
        Raises UnavailableError if none has heard it.
        """
        if not self.member.session.member:
            return
        finished = self.progress.through and self.member.session.failure is None
        ended = ended and self.member.session.failure is None
        not_main = self.progress.not_main_at == self.weights.version
        self.sender.drop_early()
        with contextlib.suppress(errors.ParamServerError):  # then the script keeps the weights that have come
            self.weights.complete()
            if self.member.session.failure is None:
                self.weights.watch.leaving()
        try:
            if self.member.session.failure is None:
                self.paces.finish()
        except errors.RolledBackError as error:
            log.info("leaving, while the job goes back to a checkpoint", reason=str(error))
        finally:
            self.progress.enter("done")
            self.weights.take_home()
            # If the job goes back, epochs may be undone, which have to be trained again.
            if (self.member.rolled_back() or self.rollback.aborted) and not self.progress.safe:
                finished = ended = False
            timeout_s = self.member.session.options.join_timeout_s if finished or ended else _LEAVE_S
            heard = self.member.run(self._leave(timeout_s, finished=finished, ended=ended, not_main=not_main))
        if (finished or ended) and not heard and self.member.session.failure is None:
            raise errors.UnavailableError(
                f"no coordinator has heard within {timeout_s:g} s that this script is done, so nobody may have "
                "gathered the result: start the job again with --resume, if it has checkpoints"
            )

    def abandon(self, reason: str) -> None:
        """Leave at once; other workers get the open slices. ``reason``: why the script failed, else empty."""
        self.sender.drop_early()
        self.weights.forget()
        if self.member.session.member:
            self.member.run(self._leave(_LEAVE_S, failure=reason), _LEAVE_S + 1.0)

    async def _leave(
        self,
        timeout_s: float,
        *,
        finished: bool = False,
        ended: bool = False,
        not_main: bool = False,
        failure: str = "",
    ) -> bool:
        """Leave; whether a coordinator has heard it."""
        await self.sender.last_pushes(timeout_s)
        session = self.member.session
        heard = await session.leave(timeout_s, finished=finished, ended=ended, not_main=not_main, failure=failure)
        await self.shards.close()
        self.places.release()
        await session.channel.close()
        return heard

    # ---- the report to the coordinator

    def facts(self) -> coordinator_pb2.WorkerReport:
        """The present state of this worker, to be read in the background as often as one likes."""
        links, version = self.shards.met, min(self.weights.versions, default=0)
        clock, waiting_for = self.paces.clock_to_tell(version), self.member.waiting_for
        report = self.progress.report()
        report.version = version
        if clock is not None:
            report.clock = clock
        report.at_work = report.at_work and not self.member.waits
        report.waiting_for = waiting_for or (links.pulls.waiting_for if links else "")
        if links is not None:
            report.transport, report.transport_reason = links.near.kind, links.near.reason
            report.host_tier = links.host.words if links.host is not None else ""
        return report

    def _report(self) -> coordinator_pb2.SessionRequest:
        report = self.facts()
        self.records.report(report, self.member.session.sessions)
        self.audited.report(report)
        if (links := self.shards.met) is not None:
            report.tally.CopyFrom(self.sender.handed.message(links.timeline, self.paces.unsent))
        self.member.phases.write(report, last=report.state == "done")
        return coordinator_pb2.SessionRequest(worker=report)
