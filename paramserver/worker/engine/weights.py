"""The weights at hand: how versions come to where the script has its model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from typing import Protocol

import structlog
import torch

from paramserver import errors
from paramserver.core.layout.plan import Kind
from paramserver.core.versions.events import Latest
from paramserver.failpoints import reach
from paramserver.v1 import shard_pb2
from paramserver.worker.device import Ticket
from paramserver.worker.flat import FlatSpace
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.shards import Shards
from paramserver.worker.memory.inplace import InPlace
from paramserver.worker.memory.places import Places
from paramserver.worker.weights.incoming import IncomingWeights
from paramserver.worker.weights.pulled import Pulled, merge
from paramserver.worker.weights.reads import Reads, unheard

log = structlog.get_logger("paramserver.worker")


class Watch(Protocol):
    """Looks at what the script has written to its weights; asked while all weights are there."""

    def check(self) -> None:
        """Between two slices. Raises UserError if what the script has written would be lost."""

    def leaving(self) -> None:
        """This worker leaves. Warns of what the script has written after its last step."""


class Weights:
    """Takes in what was pulled. Belongs to the script's thread."""

    def __init__(self, member: Member, modes: Modes, shards: Shards, places: Places) -> None:
        self._member, self._modes, self._shards, self._places = member, modes, shards, places
        self._space: FlatSpace | None = None
        self._on_weights: Callable[[FlatSpace], None] = lambda weights: None
        self._watch: Watch | None = None
        # By server, the version at hand.
        self._versions: list[int] = []
        # What the version at hand was made of, where servers need not have it any more.
        self._received: list[Pulled] = []
        # Of a model on a device: weights on their way there.
        self._bringing: Ticket | None = None
        self._in_place: InPlace | None = None
        # What tells of reads of the parameters, where the script may begin before all weights are there; what it
        # begins with just now.
        self._reads: Reads | None = None
        self._incoming: IncomingWeights | None = None
        self._stalled_s = 0.0
        self._skipped = 0
        self._taken: frozenset[int] = frozenset()
        self._heard_schedule: shard_pb2.Schedule = shard_pb2.SCHEDULE_UNSPECIFIED

    # ---- facts

    @property
    def version(self) -> int:
        """The version of the weights at hand; asynchronous: the oldest over the shards."""
        return min(self._versions)

    @property
    def versions(self) -> list[int]:
        """By server, the version at hand; empty before the first one."""
        return self._versions

    @property
    def space(self) -> FlatSpace:
        """Where they lie; exists after a model was registered."""
        assert self._space is not None, "register a model first"
        return self._space

    @property
    def in_place(self) -> InPlace | None:
        """Set where the weights are used where servers have them."""
        return self._in_place

    @property
    def whole(self) -> bool:
        """Whether all weights of the version at hand are there."""
        return self._incoming is None

    @property
    def stalled_s(self) -> float:
        """How long the script has waited for weights in the present slice."""
        return self._stalled_s

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far, since a gradient was not finite."""
        return self._skipped

    @property
    def taken(self) -> frozenset[int]:
        """Slices of the last step that were given to others than their owners."""
        return self._taken

    @property
    def heard_schedule(self) -> shard_pb2.Schedule:
        """How workers advance their schedules, by what shards have heard."""
        return self._heard_schedule

    # ---- set-up

    def use(self, space: FlatSpace, on_weights: Callable[[FlatSpace], None], watch: Watch | None) -> None:
        """Weights are to lie in ``space``, or another one; ``on_weights`` hears of each version, and where it lies.

        ``watch`` looks at what the script writes to them.
        """
        self._space, self._on_weights, self._watch = space, on_weights, watch

    def renew(self) -> None:
        """The worker has met other servers."""
        self._wait_for_copy()
        near = self._shards.links.near.shared
        self._places.renew(self.space, near)
        if self._places.mover is not None or self._shards.rounding is not None:
            near = None
        self._in_place = InPlace(near) if near is not None and InPlace.possible(near) else None
        if self._in_place is None and self.space.lent:
            self._space = FlatSpace(self.space.layout, self.space.device)

    def check_script(self) -> None:
        """Raises UserError if the script has written to the weights what would be lost."""
        if self._watch is not None:
            self._watch.check()

    def look_at_the_end(self) -> None:
        """This worker leaves, and all weights are there: warns of what the script has written after its last step."""
        if self._watch is not None:
            self._watch.leaving()

    # ---- another version

    def install(self, results: list[Pulled]) -> None:
        """Make what was pulled the version at hand."""
        self.forget()
        if self._in_place is not None:
            self._space = self._in_place.install(results)
        else:
            self._bring(results)
        self._versions = [result.version for result in results]
        kept = all(result.slot is None and result.rest is None for result in results)
        self._received = results if kept and not self._modes.together else []
        self._places.installed(self.version)
        self._skipped = max(result.skipped for result in results)
        self._taken = results[0].taken
        self._heard_schedule = max(result.schedule for result in results)
        self._modes.heard(result.consistency for result in results)
        self._on_weights(self.space)
        if self._incoming is not None and not self._listens(self._incoming, self.space):
            self._reads = None
            self.complete()
            self._on_weights(self.space)  # which may have copied what was not there
        reach("worker.after_pull", self.version)

    def _bring(self, results: list[Pulled]) -> None:
        """Copy what was pulled to where the model is; that may go on when this returns."""
        mover, rounding = self._places.mover, self._shards.rounding
        if mover is None:
            self.space.write(merge(results), rounding)
            if any(result.rest is not None for result in results):
                self._begin(results, self.space)
            return
        self._wait_for_copy()
        for result in results:
            if result.slot is not None:
                for _, source in self.space.places(result.chunks, rounding):
                    mover.lock(source, writable=False)
        places = list(self.space.places(merge(results), rounding))
        self._bringing = mover.bring([source for _, source in places], [target for target, _ in places])

    def pull_latest(self) -> None:
        """Take in the newest version, all of it."""
        self.before_pull()
        pulls = self._shards.links.pulls
        pull = pulls.pull_version(self.version) if self._modes.together else pulls.pull(Latest())
        self.install(self._member.do(pull))

    def before_pull(self) -> None:
        """Another version is about to be asked for: weights are no longer read where they came from."""
        self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        if self._bringing is not None:
            self._bringing.wait()
            self._bringing = None

    def take_home(self) -> None:
        """Whoever has left is read from no more: the script keeps a copy of the last weights."""
        if self._in_place is not None and self._space is not None:
            lent, self._space = self._space, FlatSpace(self._space.layout, self._space.device)
            self._space.copy_of(lent)
            self._in_place = None
            self._on_weights(self._space)

    # ---- weights that the script begins with before all of them are there

    @property
    def reads(self) -> Reads | None:
        """What tells of reads of the parameters; None where weights are used only when all are there."""
        return self._reads

    def listen(self, reads: Reads) -> None:
        """The script may begin before all weights are there; this tells what it reads."""
        self._reads = reads

    @property
    def may_begin(self) -> bool:
        """Whether the script may compute on the first weights while others are on their way."""
        return self._reads is not None and self._places.mover is None and self._in_place is None

    def _begin(self, results: list[Pulled], space: FlatSpace) -> None:
        """Some are still to come: the script gets each before it reads it, and buffers at once."""
        member = self._member
        self._incoming = IncomingWeights(space, results, self._shards.rounding, member.check, member.stalls)
        for placement, spec in zip(space.layout.placements, space.layout.tensors, strict=True):
            if spec.kind is Kind.BUFFER:  # of which the model has copies
                self._incoming.read(placement.tensor)

    def _listens(self, incoming: IncomingWeights, space: FlatSpace) -> bool:
        """Have it told what the script reads; False if that cannot be, as with this script it never will."""
        reads = self._reads
        return reads is not None and reads.begin(incoming, [space.view(i) for i in range(reads.count)])

    def complete(self) -> None:
        """See to it that all weights are there, of this version or a newer one."""
        if not self._settle(frozenset()):
            self.pull_latest()

    def settle_slice(self, used: frozenset[int]) -> bool:
        """A slice was computed: see to it that all weights are there.

        False: what yielded gradients of the tensors ``used`` was computed on others. Raises what keeps weights from
        coming.
        """
        self._stalled_s = 0.0
        return self._settle(used)

    def _settle(self, used: frozenset[int]) -> bool:
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return True
        if self._reads is not None:
            self._reads.end()
        with unheard():
            unread = incoming.unread(used)
            try:
                incoming.settle()
            except errors.FencedError:
                raise
            except errors.StaleViewError as error:
                log.info("some weights of the version at hand did not come any more", reason=str(error))
                return False
            finally:
                self._stalled_s += incoming.waited_s
        if unread:
            self._reads = None
            log.info(
                "this script reads weights in a way that cannot be noticed (in other threads or in compiled code): "
                "from now on it gets them when all are there"
            )
        return not unread

    def forget(self) -> None:
        """Weights that are still to come are those of yesterday."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.drop()
            if self._reads is not None:
                self._reads.end()

    # ---- the weights as the servers have them, whatever the script has done to its copy

    def originals(self, tensors: Collection[int]) -> dict[int, torch.Tensor] | None:
        """These trained tensors of the version at hand, in the servers' type; None if the servers have dropped it.

        Asked only when something seems to have been changed, between two slices.
        """
        layout = self.space.layout
        wanted = [c for c in layout.chunks if any(piece.tensor in tensors for piece in c.pieces)]
        at_hand = self._at_hand({self._shards.plan.owner[chunk.index] for chunk in wanted})
        if at_hand is None:
            return None
        found: dict[int, torch.Tensor] = {}
        for chunk in wanted:
            ((target, source),) = self.space.places({chunk.index: at_hand[chunk.index]}, self._shards.rounding)
            for piece in chunk.pieces:
                if piece.tensor in tensors and piece.tensor not in found:
                    found[piece.tensor] = torch.empty(layout.placements[piece.tensor].elements, dtype=target.dtype)
                if piece.tensor in tensors:
                    values = source[piece.chunk_start : piece.chunk_start + piece.elements]
                    found[piece.tensor][piece.tensor_start : piece.tensor_start + piece.elements] = values
        return {index: flat.view(layout.tensors[index].shape) for index, flat in found.items()}

    def _at_hand(self, servers: Set[int]) -> Mapping[int, memoryview] | None:
        """All chunks of these servers, of the version at hand."""
        links = self._shards.links
        shared = links.near.shared
        if self._in_place is not None and shared is not None and servers <= shared.reading.keys():
            return {
                index: data
                for server in servers
                for index, data in shared.chunks_in(server, shared.reading[server]).items()
            }
        if self._received:
            return merge(self._received)
        try:
            return merge(self._member.do(links.pulls.again(self._versions)))
        except errors.GoneError:
            return None
