"""The weights at hand: takes versions in and puts them where the script has its model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set

import structlog
import torch

from paramserver import errors
from paramserver.core.layout.plan import Kind
from paramserver.core.versions.events import AtLeast, Latest
from paramserver.failpoints import reach
from paramserver.tensors.private import unheard
from paramserver.tracing import SCRIPT
from paramserver.wire.messages import unpack_mask
from paramserver.worker.device import Ticket
from paramserver.worker.flat import FlatSpace
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.phases import RECEIVE
from paramserver.worker.job.shards import Shards
from paramserver.worker.links.pulls import Pull, exactly
from paramserver.worker.memory.inplace import InPlace
from paramserver.worker.memory.places import Places
from paramserver.worker.weights.incoming import IncomingWeights
from paramserver.worker.weights.landing import Landings
from paramserver.worker.weights.pulled import Pulled, merge
from paramserver.worker.weights.reads import Reads

log = structlog.get_logger("paramserver.worker")


class Watch:
    """Hears of versions, and looks at the model of the script; `script.guard` does. This class itself sees nothing."""

    def begins(self, others: Iterator[int]) -> None:
        """The first version is about to come. ``others``: its tensors that this worker brought with other values."""

    def came(self, weights: FlatSpace) -> None:
        """Another version is at hand, and lies in ``weights``; some of it may still be to come."""

    def check(self) -> None:
        """Between two slices, when all weights are there. Raises UserError if the script's writes would be lost."""

    def leaving(self) -> None:
        """This worker leaves, and all weights are there. Warns if the script wrote to them after its last step."""


class Weights:
    """Takes in what was pulled. Belongs to the script's thread.

    ``version``: of the weights at hand; asynchronous: the oldest over the shards. ``versions``: the same by server,
    empty before the first one. ``space``: where the weights lie; exists after :meth:`use`.
    """

    def __init__(self, member: Member, modes: Modes, shards: Shards, places: Places) -> None:
        self._member, self._modes, self._shards, self._places = member, modes, shards, places
        self.space: FlatSpace
        self.watch = Watch()
        self.version = 0
        self.versions: list[int] = []
        # Answers of which the version at hand was made, where servers may have dropped it meanwhile.
        self._received: list[Pulled] = []
        # Where the next version is received while the script uses the present one; and whether the present version
        # was received into `space`, where streams that were given up may still write if it is torn.
        self._landings = Landings()
        self._landed = self._torn = False
        # Of a model on a device: weights on their way there.
        self._bringing: Ticket | None = None
        # Set where the weights are used where servers have them.
        self.in_place: InPlace | None = None
        # Tells of reads of the parameters; None where the script gets weights only when all are there.
        self.reads: Reads | None = None
        # The weights that the script began to compute with before all of them were there.
        self._incoming: IncomingWeights | None = None
        # Seconds for which the script has waited for weights, or for other slices, in the present slice.
        self.stalled_s = 0.0
        # Steps that were skipped so far, since a gradient was not finite.
        self.skipped = 0
        # Slices of the last step that were given to other workers than their owners.
        self.taken: frozenset[int] = frozenset()
        # When workers advance their schedulers, by what shards have heard; see `core.versions.advances`.
        self.heard_advances = ""
        # Servers copy the version at hand for a checkpoint.
        self.copied = False
        # The tensors that some contribution has had numbers for, up to the version at hand; and as servers say it.
        self.ever_used: frozenset[int] = frozenset()
        self._ever_used = b""

    @property
    def whole(self) -> bool:
        """Whether all weights of the version at hand are there."""
        return self._incoming is None

    # ---- set-up

    def use(self, space: FlatSpace, watch: Watch) -> None:
        """Weights are to lie in ``space``, or in another one, which ``watch`` then hears of."""
        self.space, self.watch = space, watch

    def renew(self) -> None:
        """The worker has met other servers."""
        self.end_copy()
        near = self._shards.links.near.shared
        self._places.renew(self.space, self._shards.links.inbox)
        if self._places.mover is not None or self._shards.rounding is not None:
            near = None
        self.in_place = InPlace(near) if near is not None and InPlace.possible(near) else None
        if self.in_place is None and self.space.lent:
            self.space = FlatSpace(self.space.layout, self.space.device)

    # ---- another version

    def install(self, results: list[Pulled]) -> None:
        """Make these answers of the servers the version at hand."""
        former = self._member.phases.enter(RECEIVE)
        try:
            self._install(results)
        finally:
            self._member.phases.enter(former)

    def _install(self, results: list[Pulled]) -> None:
        trace = self._member.trace
        began = trace.now() if trace.script else 0
        self.forget()
        self._lend(results)
        if self.in_place is not None:
            self.space = self.in_place.install(results)
        else:
            self._land(results)
            self._bring(results)
        self.versions = [result.version for result in results]
        self.version = min(self.versions)
        kept = all(result.slot is None and result.rest is None for result in results)
        self._received = results if kept and not self._modes.together else []
        self._shards.links.pushes.published(self.version)
        self._places.installed(self.version)
        self.skipped = max(result.skipped for result in results)
        self.taken = results[0].taken
        self.heard_advances = max((result.advances for result in results), key=len)
        self.copied = any(result.copied for result in results)
        self._hear_used(results)
        self._modes.heard(result.consistency for result in results)
        self.watch.came(self.space)
        if self._incoming is not None and not self._listens(self._incoming, self.space):
            self.reads = None
            self.complete()
            self.watch.came(self.space)  # again: the first call may have copied weights that had not come
        if began:
            trace.span("install", SCRIPT, began, version=self.version)
        reach("worker.after_pull", self.version)

    def _hear_used(self, results: list[Pulled]) -> None:
        """Take in which tensors were used so far, which seldom changes. Asynchronous shards may differ for a moment."""
        masks = [result.ever_used for result in results]
        told = max(masks, key=lambda mask: int.from_bytes(mask, "little").bit_count())
        if told and told != self._ever_used:
            self._ever_used, self.ever_used = told, unpack_mask(told, len(self.space.layout.tensors))

    def _lend(self, results: list[Pulled]) -> None:
        """Begin or end to use the weights where the worker has them that pulls for this host."""
        links = self._shards.links
        if links.host is None or links.near.shared is not None or self._places.mover is not None:
            return
        if self.in_place is None and results[0].slot is not None:
            self.in_place = InPlace(links.host, self.space)
            self._landings, self._landed, self._torn = Landings(), False, False
        elif self.in_place is not None and results[0].slot is None and not (links.host.shares and self._modes.together):
            lent, self.space = self.space, FlatSpace(self.space.layout, self.space.device)
            self.space.copy_of(lent)
            self.in_place = None
            links.host.reading.clear()

    def _land(self, results: list[Pulled]) -> None:
        """Have the version at hand lie where these answers were received, if that is not memory of their own."""
        landings, whole = [result.landing for result in results], all(result.rest is None for result in results)
        landed = self._landings.take(landings, whole, None if self._torn else self.space)
        self._landed = landed is not None
        if landed is not None:
            self.space = landed
        elif self._torn:
            self.space = self.space.twin()
        self._torn = False

    def next_pull(self, version: int) -> Pull:
        """The question for the next version, in synchronous mode. Servers may answer while they make the version."""
        landing = self._landings.begin(self.space, self._shards.plan) if self._lands else None
        return Pull(AtLeast(version), ahead=True, begin=self.may_begin, landing=landing)

    @property
    def _lands(self) -> bool:
        """Whether the next version may be received where the model will have it."""
        if self._places.mover is not None or self.in_place is not None or self._shards.rounding is not None:
            return False
        links = self._shards.links
        if links.host is not None and links.host.shares:
            return False
        return self._modes.together and links.near.receives_in_place

    def _bring(self, results: list[Pulled]) -> None:
        """Copy the weights to where the model is; a copy to a device may still go on when this returns."""
        mover, rounding = self._places.mover, self._shards.rounding
        if mover is None:
            self.space.write(merge(results), rounding)
            if any(result.rest is not None for result in results):
                self._begin(results, self.space)
            return
        self.end_copy()
        for result in results:
            if result.slot is not None:
                for _, source in self.space.places(result.chunks, rounding):
                    mover.lock(source, writable=False)
        places = list(self.space.places(merge(results), rounding))
        self._bringing = mover.bring([source for _, source in places], [target for target, _ in places])

    def pull_latest(self) -> None:
        """Take in the newest version, all of it."""
        self.end_copy()
        pull = Pull(AtLeast(self.version) if self._modes.together else Latest())
        self.install(self._member.do(self._shards.links.pulls.ask(pull)))

    def end_copy(self) -> None:
        """Another version is about to be asked for: wait until the device has a copy of the present one."""
        if self._bringing is not None:
            self._bringing.wait()
            self._bringing = None

    def take_home(self) -> None:
        """The worker has left, and reads no memory of servers any more: the script keeps a copy of the last weights."""
        if self.in_place is not None:
            lent, self.space = self.space, FlatSpace(self.space.layout, self.space.device)
            self.space.copy_of(lent)
            self.in_place = None
            self.watch.came(self.space)

    # ---- weights that the script begins with before all of them are there

    def listen(self, reads: Reads) -> None:
        """The script may begin before all weights are there; ``reads`` tells what it reads."""
        self.reads = reads

    @property
    def may_begin(self) -> bool:
        """Whether the script may compute on the first weights while others are on their way."""
        return self.reads is not None and self._places.mover is None and self.in_place is None

    def _begin(self, results: list[Pulled], space: FlatSpace) -> None:
        """Some weights are still to come: the script gets each before it reads it, and buffers at once."""
        member = self._member
        self._incoming = IncomingWeights(space, results, self._shards.rounding, member.check, member.stalls)
        for placement, spec in zip(space.layout.placements, space.layout.tensors, strict=True):
            if spec.kind is Kind.BUFFER:  # of which the model has copies
                self._incoming.read(placement.tensor)

    def _listens(self, incoming: IncomingWeights, space: FlatSpace) -> bool:
        """Have ``incoming`` hear of the script's reads; False if torch cannot report the reads of this script."""
        reads = self.reads
        return reads is not None and reads.begin(incoming, [space.view(i) for i in range(reads.count)])

    def complete(self) -> None:
        """Wait until all weights of this version or a newer one are there."""
        if not self._settle(frozenset()):
            self.pull_latest()

    def settle_slice(self, used: frozenset[int], waited_s: float) -> bool:
        """A slice was computed, and waited for other slices for ``waited_s`` seconds: wait until all weights are there.

        False: the gradients of the tensors ``used`` were computed on weights of several versions. Raises the error that
        keeps weights from coming.
        """
        self.stalled_s = waited_s
        return self._settle(used)

    def _settle(self, used: frozenset[int]) -> bool:
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return True
        if self.reads is not None:
            self.reads.end()
        self._torn = self._landed
        with unheard():
            unread = incoming.unread(used)
            try:
                incoming.settle()
                self._torn = False
            except errors.FencedError:
                raise
            except errors.StaleViewError as error:
                log.info("some weights of the version at hand did not come any more", reason=str(error))
                return False
            finally:
                self.stalled_s += incoming.waited_s
        if unread:
            self.reads = None
            log.info(
                "this script reads weights in a way that cannot be noticed (in other threads or in compiled code): "
                "from now on it gets them when all are there"
            )
        return not unread

    def forget(self) -> None:
        """Weights that are still to come are out of date: do not wait for them."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            self._torn = self._landed
            incoming.drop()
            if self.reads is not None:
                self.reads.end()

    # ---- the weights as the servers have them, without the script's writes

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
        """All chunks of the version at hand that these servers have; None if a server has dropped them."""
        links = self._shards.links
        source = self.in_place.source if self.in_place is not None else None
        if source is not None and servers <= source.reading.keys():
            return {
                index: data
                for server in servers
                for index, data in source.chunks_in(server, source.reading[server]).items()
            }
        if self._received:
            return merge(self._received)
        try:
            return merge(self._member.do(links.pulls.ask(Pull(exactly(self.versions), copied=True))))
        except errors.GoneError:
            return None
