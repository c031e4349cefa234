"""How a worker gets its first weights, and the weights of another timeline after the job went back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import structlog
import torch

from paramserver import errors
from paramserver.compress.casts import Cast
from paramserver.core.layout.plan import Plan
from paramserver.v1 import types_pb2
from paramserver.wire.messages import plan_of
from paramserver.worker import startup
from paramserver.worker.flat import FlatSpace
from paramserver.worker.gradients.sender import Sender
from paramserver.worker.job.member import Member
from paramserver.worker.job.progress import Progress
from paramserver.worker.job.shards import Shards
from paramserver.worker.script.state import NOTHING, Brought
from paramserver.worker.startup import Offer
from paramserver.worker.weights.pulled import Pulled, merge
from paramserver.worker.weights.weights import Watch, Weights
from paramserver.worker.weights.writes import equal_bits

log = structlog.get_logger("paramserver.worker")


class Entry:
    """Registers the model, meets the servers, takes in the present version."""

    def __init__(self, member: Member, shards: Shards, weights: Weights, sender: Sender, progress: Progress) -> None:
        self._member, self._shards, self._weights = member, shards, weights
        self._sender, self._progress = sender, progress
        self._may_upload = False
        # The optimizer state that goes with version 0, until version 0 exists.
        self._brought = NOTHING

    def promote_to_begin(self) -> None:
        """An observer becomes a worker if it brings a model to a job that waits for workers."""
        view = self._member.session.view
        if not view.launched and view.state in (types_pb2.JOB_STATE_WAITING, types_pb2.JOB_STATE_INITIALISING):
            self._member.promote()

    def attach(self) -> types_pb2.ModelSpec:
        """Take over the model that the job trains, whatever it is, with its present weights; returns its description.

        Raises UserError if the job has none yet.
        """
        model, servers = self._member.run(startup.present_model(self._member.session))
        self._start(plan_of(model, servers), lambda plan: FlatSpace(plan.layout, torch.device("cpu")), Watch())
        return model

    def register(
        self,
        model: types_pb2.ModelSpec,
        space: Callable[[Plan], FlatSpace],
        brought: Brought = NOTHING,
        watch: Watch | None = None,
        script: bool = False,
    ) -> Plan:
        """Register the model, bring or fetch version 0, wait until all members are there.

        ``space`` makes the flat space of the plan and fills in this worker's initial values. ``brought``: the optimizer
        state to begin with. ``watch`` hears of each version. ``script``: version 0 is that of the main worker. Raises
        ModelError if another worker registered another model.
        """
        self._progress.enter("registering")
        plan = self._member.run(startup.register_model(self._member.session, model, brought.digest(), script))
        self._brought, self._may_upload = brought, True
        self._start(plan, space, watch or Watch())
        self._brought = NOTHING
        self._progress.enter("training")
        return plan

    def _start(self, plan: Plan, space: Callable[[Plan], FlatSpace], watch: Watch) -> None:
        self._weights.use(space(plan), watch)
        self._shards.use(plan)
        self.enter(None)

    def enter(self, loads: Offer | None) -> None:
        """Connect to the present servers, upload a first version if that falls to this worker, take the present one in.

        ``loads``: the weights and state of a ``ctx.load``.
        """
        initial, session = self._weights.space.on_cpu(), self._member.session
        offer = loads
        if offer is None and self._may_upload:
            offer = Offer(initial.read, self._brought.parts)

        async def go() -> list[Pulled]:
            while True:
                try:
                    links = await self._shards.connect()
                    return await startup.first_version(session, links, offer)
                except errors.RolledBackError as error:
                    log.info("the job went back meanwhile", reason=str(error))

        first = self._member.run(go())
        if not self._weights.versions and not any(result.version for result in first):
            self._weights.watch.begins(_others(initial, first, self._shards.rounding))
        self._sender.handed.begin_again()
        self._weights.renew()
        self._weights.install(first)


def _others(initial: FlatSpace, first: list[Pulled], rounding: Cast | None) -> Iterator[int]:
    """The tensors of which version 0 has other values than this worker's ``initial`` ones."""
    chunks = merge(first)
    for index, (mine, theirs) in zip(chunks, initial.places(chunks, rounding), strict=True):
        mine = mine.to(theirs.dtype)
        if equal_bits(mine, theirs):
            continue
        for piece in initial.layout.chunks[index].pieces:
            part = slice(piece.chunk_start, piece.chunk_start + piece.elements)
            if not equal_bits(mine[part], theirs[part]):
                yield piece.tensor
