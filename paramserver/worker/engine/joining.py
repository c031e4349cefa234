"""How a worker gets to its first weights: member, model, servers, memory, data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import structlog

from paramserver import errors
from paramserver.core.layout.plan import Plan
from paramserver.core.work.slices import DataSpec
from paramserver.membership.session import Session
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import data_to_proto, plan_of
from paramserver.worker import startup
from paramserver.worker.device import mover_for
from paramserver.worker.engine.weights import Weights
from paramserver.worker.flat import FlatSpace, PartialSumPool, no_space
from paramserver.worker.gradients.staging import Staging
from paramserver.worker.memory.inplace import InPlace
from paramserver.worker.pace import AsyncPace
from paramserver.worker.script.state import NOTHING, Brought
from paramserver.worker.weights.pulled import Pulled

log = structlog.get_logger("paramserver.worker")


class Joining(Weights):
    """Becomes a part of a job."""

    def join(self) -> None:
        """Become a member of the job; raises what the coordinator refuses with."""

        async def go() -> None:
            self._session = Session(self._coordinator, self.options, self._report)
            await self._session.join()

        self._run(go())

    def promote(self) -> None:
        """An observer becomes a worker: from now on it is given slices, and others wait for it."""
        if self.options.role != types_pb2.ROLE_OBSERVER:
            return

        async def go() -> None:
            former = self.session
            self.options = replace(self.options, role=types_pb2.ROLE_WORKER)
            self._session = Session(former.channel, self.options, self._report)
            await self._session.join()
            await former.leave()

        self._run(go())

    def promote_to_begin(self) -> None:
        """An observer that brings a model to a job which waits for workers is one of them."""
        view = self.session.view
        if not view.launched and view.state in (types_pb2.JOB_STATE_WAITING, types_pb2.JOB_STATE_INITIALISING):
            self.promote()

    def attach(self, space: Callable[[Plan], FlatSpace]) -> types_pb2.ModelSpec:
        """Take over the model that the job trains, whatever it is, with its present weights; returns its description.

        Raises UserError if the job has none yet.
        """

        model, servers = self._run(startup.present_model(self.session))
        self._start(plan_of(model, servers), space, lambda weights: None, may_upload=False)
        return model

    def register(
        self,
        model: types_pb2.ModelSpec,
        space: Callable[[Plan], FlatSpace],
        on_weights: Callable[[FlatSpace], None],
        brought: Brought = NOTHING,
    ) -> Plan:
        """Register the model, bring or fetch version 0, wait until everybody is there.

        ``space`` makes the flat space of the plan and fills in this worker's initial values; ``on_weights`` is called
        with a space, that one or another, whenever there is another version in it. ``brought``: the optimizer state to
        begin with. Raises ModelError if another worker registered another model.
        """
        self.state = "registering"
        plan = self._run(startup.register_model(self.session, model, brought.digest()))
        self._brought = brought
        self._start(plan, space, on_weights, may_upload=True)
        self._brought = NOTHING
        self.state = "training"
        return plan

    def register_data(self, data: DataSpec) -> None:
        """Say how the data is cut; raises DataError if another worker's data differs."""

        def request() -> coordinator_pb2.RegisterDataRequest:
            return coordinator_pb2.RegisterDataRequest(member=self.session.member, data=data_to_proto(data))

        self._run(self.session.ask("Coordinator.RegisterData", request, 60.0))
        self._data = data

    def ensure_data(self) -> None:
        """Without a data set slices are only names. Raises DataError if the job has one."""
        if self._data is None:
            self.register_data(DataSpec(0, 0))

    def _start(
        self,
        plan: Plan,
        space: Callable[[Plan], FlatSpace],
        on_weights: Callable[[FlatSpace], None],
        may_upload: bool,
    ) -> None:
        """Connect to the shards, see to it that there is a version 0, and take the present version in."""
        self._weights = space(plan)
        self._plan, self._may_upload, self._on_weights = plan, may_upload, on_weights
        self._enter()

    def _enter(self) -> None:
        """Connect to the shards as they are now, and take the present version in."""
        assert self._plan is not None
        assert self._weights is not None
        plan, initial = self._plan, self._weights.on_cpu()
        # Who only looks needs no memory of its own.
        transport = self.transport if self.options.role == types_pb2.ROLE_WORKER else "grpc"

        async def go() -> list[Pulled]:
            while True:
                if self._links is not None:
                    await self._links.close()
                self._links = await startup.open_links(
                    self.session,
                    plan,
                    self._connect,
                    lambda: self.session.member,
                    self.rounding,
                    self._wait_timeout_s,
                )
                try:
                    await startup.share_memory(self.session, self._links, plan, transport)
                    offer = self._loads
                    if offer is None and self._may_upload:
                        offer = startup.Offer(initial.read, partial(self._brought.parts, plan.layout))
                    return await startup.first_version(self.session, self._links, offer)
                except errors.RolledBackError as error:
                    log.info("the job went back meanwhile", reason=str(error))

        first = self._run(go())
        self.handed.begin_again()
        device, shared = self._weights.device, self.links.near.shared
        inbox = shared.inbox.space if shared is not None else no_space
        self._wait_for_copy()
        if self._mover is not None:
            self._mover.release()
        self._mover = self._mover or mover_for(device)
        self._staging = Staging(plan.layout, self._mover, inbox) if self._mover is not None else None
        near = shared if self._mover is None else None
        self._pool = PartialSumPool(plan.layout, device, inbox if self._mover is None else no_space)
        exact = self.rounding is None
        self.in_place = InPlace(near) if near is not None and exact and InPlace.possible(near) else None
        if self.in_place is None and self._weights.lent:
            self._weights = FlatSpace(plan.layout, device)
        self._install(first)

    def _report(self) -> coordinator_pb2.SessionRequest:
        links = self._links
        report = coordinator_pb2.WorkerReport(
            version=min(self._versions, default=0),
            clock=self._pace.clock if isinstance(self._pace, AsyncPace) else min(self._versions, default=0),
            epoch=self.epoch,
            samples=self.samples,
            slices=self.slices,
            state=self.state,
            waiting_for=self.waiting_for or (links.pulls.waiting_for if links else ""),
            metrics=dict(self.metrics),
            transport=links.near.kind if links else "",
            epochs_planned=self.epochs_planned,
            computing=self.computing,
            at_work=self.state == "training" and not self.through and not self._waiting,
            slice_s=median(times) if (times := list(self._slice_times)) else 0.0,
            tally=self.handed.message(links.timeline, self._pace.unsent if self._pace else 0) if links else None,
        )
        return coordinator_pb2.SessionRequest(worker=report)
