"""The tensors of one shard: makes versions out of contributions. Runs in the server's arithmetic thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paramserver.core.layout.optimizers import Optimizers
from paramserver.core.layout.plan import ADDED, Chunk, Kind, Layout, joined, units
from paramserver.core.versions.advances import Advances
from paramserver.core.versions.names import AsyncName, SyncName
from paramserver.core.versions.reduction import Node
from paramserver.errors import NonFiniteError
from paramserver.failpoints import planned, reach
from paramserver.server.arithmetic.combine import Sum, combine
from paramserver.server.arithmetic.state import State, StateCopy, StateEntry
from paramserver.server.arithmetic.whole import state_of
from paramserver.server.team import Team
from paramserver.server.versions.receive import first_non_finite
from paramserver.server.versions.version import Version

if TYPE_CHECKING:
    from paramserver.core.versions.names import Name

# With fewer bytes to update, one thread is done before others have begun.
_ALONE_BYTES = 512 << 10
Hypers = Mapping[str, float | bool | tuple[float, ...]]
# Memory for what is applied to a chunk, as long as the chunk.
Keep = Callable[[Chunk], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contribution that passed all checks.

    ``chunks``: by chunk index, the sum over its slices of (samples × mean gradient), and for buffers of
    (samples × change); chunks without a used tensor are not there. ``groups``: hyper-parameters per parameter group.
    """

    name: Name
    worker: int
    samples: int
    overflow: bool
    base_version: int
    used: frozenset[int]
    groups: tuple[Hypers, ...]
    chunks: Mapping[int, torch.Tensor]
    # Above 0: the global norm to which the step's gradient is clipped.
    clip_norm: float = 0.0
    # As in `PushHeader`; empty: the worker does not know yet when its script advances schedulers.
    advances: str = Advances().encode()
    # All numbers have been seen to be finite by this server, not only by the worker.
    checked: bool = True
    # Of a backup: the chunks are what the optimizer applies, as `ShardTensors.combined` of the primary has made them.
    combined: bool = False
    # As in `PushHeader`.
    nonce: int = 0


@dataclass(frozen=True, slots=True)
class Making:
    """A version that is being made."""

    base: Version
    parts: tuple[Contribution, ...]
    samples: int
    used: frozenset[int]
    leader: Contribution

    def used_in(self, chunk: Chunk) -> frozenset[int]:
        """The tensors in a chunk that change."""
        return frozenset([piece.tensor for piece in chunk.pieces if piece.tensor in self.used])


class ShardTensors:
    """Weights and optimizer state of the chunks that one server holds.

    Runs in the server's arithmetic thread; the copies of :meth:`copy_states` may be read by another one.
    """

    def __init__(
        self, layout: Layout, chunks: Sequence[Chunk], optimizers: Optimizers, team: Team | None = None
    ) -> None:
        """``team``: threads that work on a chunk each; the bits are the same with any number of them."""
        self.layout = layout
        self._team = team or Team()
        self.chunks = tuple(chunks)
        self.optimizers = optimizers
        self.skipped = 0
        # Samples that all versions together were made of.
        self.samples = 0
        self.advances = ""
        # As in `PullHeader`: the tensors that contributions to this version or earlier ones had numbers for.
        self.ever_used: frozenset[int] = frozenset()
        # Seconds that updates have waited for copies of the optimizer state.
        self.copy_s = 0.0
        self.states: dict[int, State] = {
            unit[0].index: state_of(joined(unit), optimizers.of(unit[0].group), layout)
            for unit in units(chunks)
            if unit[0].kind is Kind.PARAMETER
        }
        # Held while the state of a chunk is read outside of an update.
        self._lock = threading.Lock()
        self._copying: tuple[StateCopy, ...] = ()
        self._listing = threading.Lock()

    def chunks_used(self, used: frozenset[int]) -> dict[int, Chunk]:
        """The chunks that a contribution with these used tensors must bring."""
        return {chunk.index: chunk for chunk in self.chunks if chunk.kind is not Kind.FROZEN and chunk.uses(used)}

    def build(
        self,
        base: Version,
        contributions: Sequence[Contribution],
        given: Mapping[int, torch.Tensor] | None = None,
        space: Callable[[Chunk], torch.Tensor] | None = None,
        drafted: Mapping[int, tuple[torch.Tensor, State | None]] | None = None,
        keep: Keep | None = None,
    ) -> Version:
        """The version after ``base``: contributions in the order of their slices, combined and applied once.

        Skipped (same weights, counted in ``skipped``) if a gradient of the step was not finite; unchanged if no sample
        counted. ``given``: what to apply, by chunk, where :meth:`combined` has made it already.
        ``space``: memory for the new version; then all of its chunks but frozen ones lie there, unless it is the same
        as ``base``. ``drafted``: what :meth:`drafted` has made of the same contributions. ``keep``: memory for what is
        applied to a chunk, where that is left, too. Works in several threads.

        Raises NonFiniteError if the combined gradient of contributions that nobody has checked is not finite.
        """
        making = self.making(base, contributions)
        self.samples += making.samples
        self.advances = making.leader.advances or self.advances
        if any(c.overflow for c in contributions):
            self.skipped += 1
            return Version(base.number + 1, self.chunks, base.tensors, self.ever_used)
        if not making.samples:
            return Version(base.number + 1, self.chunks, base.tensors, self.ever_used)
        if not making.used <= self.ever_used:
            self.ever_used |= making.used

        def following(chunk: Chunk) -> torch.Tensor:
            out = None if space is None else space(chunk)
            if drafted is not None and chunk.index in drafted:
                weights, state = drafted[chunk.index]
                if state is not None:
                    self._copy_first(chunk.index)
                    self.states[chunk.index] = state
                return weights if out is None else out.copy_(weights)
            return self._next(chunk, making, None if given is None else given.get(chunk.index), out, keep=keep)[0]

        def together(unit: tuple[Chunk, ...]) -> list[torch.Tensor]:
            if len(unit) == 1:
                return [following(unit[0])]
            outs = [] if space is None else [space(chunk) for chunk in unit]
            return self._next_together(unit, making, given or {}, outs, keep)

        moving = [chunk for chunk in self.chunks if chunk.kind is not Kind.FROZEN]
        made = itertools.chain.from_iterable(self._each(together, units(moving)))
        tensors = {**base.tensors, **{chunk.index: new for chunk, new in zip(moving, made, strict=True)}}
        return Version(base.number + 1, self.chunks, tensors, self.ever_used)

    @staticmethod
    def making(base: Version, contributions: Sequence[Contribution]) -> Making:
        """The facts common to all chunks of the version after ``base``, if it is made of these contributions."""
        samples = sum(c.samples for c in contributions)
        return Making(base, tuple(contributions), samples, used_by(contributions), leading(contributions))

    def drafted(
        self, chunk: Chunk, making: Making, keep: Keep | None = None
    ) -> tuple[torch.Tensor, State | None, bool]:
        """A chunk of a draft. The contributions need to have no more than this chunk. ``keep``: as in :meth:`build`.

        Changes nothing: the state that goes with it (None: as it is) is a copy. The last value: whether all numbers of
        the contributions in this chunk are known to be finite.
        """
        return self._next(chunk, making, fork=True, keep=keep)

    def holds(self, chunks: Sequence[Chunk]) -> None:
        """A backup: these chunks are there."""
        self.chunks = tuple(chunks)

    def _next(
        self,
        chunk: Chunk,
        making: Making,
        given: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        fork: bool = False,
        keep: Keep | None = None,
    ) -> tuple[torch.Tensor, State | None, bool]:
        """The next weights of a chunk, in ``out`` if given, and the state that was updated, if there is any.

        ``given``: what to apply, if it is known already. ``fork``: the state is a copy, and that of the shard stays as
        it is. ``keep``: as in :meth:`build`. The last value: as in :meth:`drafted`, False without ``fork``.
        """
        here = making.used_in(chunk)
        weights = making.base.tensors[chunk.index]
        if not here:
            return (weights if out is None else out.copy_(weights)), None, False
        kept = None if keep is None or given is not None else keep(chunk)
        if chunk.kind is Kind.BUFFER:
            change = self._change(chunk, making, kept) if given is None else given
            return torch.add(weights, change, out=out), None, False
        summed = self._summed(chunk, making, kept, fork) if given is None else Sum.of(given)
        if kept is not None and len(here) < len({piece.tensor for piece in chunk.pieces}):
            # The update looks at some pieces only, but all that is kept has to be this sum.
            summed.whole()
            self._check(chunk, summed, making.parts)
            summed = Sum.of(kept)
        if fork:
            with self._lock:
                state = self.states[chunk.index].fork()
        else:
            self._copy_first(chunk.index)
            state = self.states[chunk.index]
        reach("apply.mid", making.base.number)
        new = state.step(weights, summed, here, making.leader.groups[chunk.group], out)
        self._check(chunk, summed, making.parts)
        reach("apply.after_weights_before_opt", making.base.number)
        return new, state, fork and summed.all_finite

    def _next_together(
        self,
        unit: tuple[Chunk, ...],
        making: Making,
        given: Mapping[int, torch.Tensor],
        outs: Sequence[torch.Tensor],
        keep: Keep | None,
    ) -> list[torch.Tensor]:
        """The next weights of the chunks of one tensor, in ``outs`` if there are any. ``given``, ``keep``: as above."""
        old = [making.base.tensors[chunk.index] for chunk in unit]
        here = making.used_in(unit[0])
        if here:
            gradient = torch.cat([self._gradient(chunk, making, given.get(chunk.index), keep) for chunk in unit])
            self._copy_first(unit[0].index)
            reach("apply.mid", making.base.number)
            groups = making.leader.groups
            whole = self.states[unit[0].index].step(torch.cat(old), gradient, here, groups[unit[0].group])
            reach("apply.after_weights_before_opt", making.base.number)
            old = [whole[at : at + chunk.elements] for chunk in unit for at in [chunk.start - unit[0].start]]
        return [out.copy_(new) for out, new in zip(outs, old, strict=True)] if outs else old

    def _gradient(self, chunk: Chunk, making: Making, given: torch.Tensor | None, keep: Keep | None) -> torch.Tensor:
        """The gradient of a step, checked: what is ``given``, or the whole sum."""
        if given is not None:
            return given
        summed = self._summed(chunk, making, None if keep is None else keep(chunk))
        gradient = summed.whole()
        self._check(chunk, summed, making.parts)
        return gradient

    def _each(
        self, work: Callable[[tuple[Chunk, ...]], list[torch.Tensor]], moving: Sequence[tuple[Chunk, ...]]
    ) -> list[list[torch.Tensor]]:
        # A planned fault strikes between two chunks, in the thread that is known to be this server's.
        small = sum(chunk.nbytes for unit in moving for chunk in unit) <= _ALONE_BYTES
        if small or planned("apply.mid") or planned("apply.after_weights_before_opt"):
            return [work(unit) for unit in moving]
        return self._team.each(work, moving)

    def combined(
        self,
        base: Version,
        contributions: Sequence[Contribution],
        keep: Keep | None = None,
    ) -> dict[int, torch.Tensor]:
        """The gradient that the optimizer applies, by chunk: the sum over all contributions, divided by the samples.

        ``keep``: as in :meth:`build`; then also the changes of buffers. Empty if the step changes no weights.
        """
        making = self.making(base, contributions)
        if not making.samples or any(c.overflow for c in contributions):
            return {}
        kinds = (Kind.PARAMETER,) if keep is None else (Kind.PARAMETER, Kind.BUFFER)
        wanted = [chunk for chunk in self.chunks if chunk.kind in kinds and chunk.uses(making.used)]

        def one(chunk: Chunk) -> torch.Tensor:
            if chunk.kind is Kind.BUFFER:
                return self._change(chunk, making, None if keep is None else keep(chunk))
            return self._gradient(chunk, making, None, keep)

        return {chunk.index: made for chunk, made in zip(wanted, self._team.each(one, wanted), strict=True)}

    def _summed(self, chunk: Chunk, making: Making, kept: torch.Tensor | None, look: bool = False) -> Sum:
        """The gradient of a step. The caller uses it up and then calls :meth:`_check`.

        ``look``: the sum tells whether all numbers are finite, also of contributions that are checked.
        """
        nodes, of = self._nodes(chunk, making.base.tensors[chunk.index], making.parts)
        divisor = 1.0 if self.optimizers.sums else float(making.samples)
        return Sum(nodes, of, divisor, look or not all(c.checked for c in making.parts), kept)

    def _check(self, chunk: Chunk, summed: Sum, contributions: Sequence[Contribution]) -> None:
        """Raises NonFiniteError if a gradient is not finite although its worker says that it is."""
        if summed.finite:
            return
        for one in contributions:  # a sum of finite numbers may overflow, and is then applied as it is
            part = None if one.checked else one.chunks.get(chunk.index)
            bad = None if part is None else first_non_finite(self.layout, {chunk.index: part})
            if bad is not None:
                raise NonFiniteError(
                    f"the gradient of {bad!r} is not finite, although worker {one.worker} says it has checked it"
                )

    def _change(self, chunk: Chunk, making: Making, kept: torch.Tensor | None) -> torch.Tensor:
        """The mean change of buffers, or the sum of changes (``ADDED``).

        Asynchronous: for a mean, a change measured on an old version counts one part in the number of versions since.
        """
        nodes, of = self._nodes(chunk, making.base.tensors[chunk.index], making.parts)
        if chunk.group == ADDED:
            return combine(nodes, of, 1.0, kept)
        first = making.parts[0]
        behind = max(0, making.base.number - first.base_version) if isinstance(first.name, AsyncName) else 0
        return combine(nodes, of, float(making.samples * (behind + 1)), kept)

    def _nodes(
        self, chunk: Chunk, like: torch.Tensor, contributions: Sequence[Contribution]
    ) -> tuple[list[tuple[Node, torch.Tensor]], int]:
        """A contribution without this chunk adds zeros, exactly as if its worker had summed it with its neighbour."""
        nodes: list[tuple[Node, torch.Tensor]] = []
        of = 1
        for contribution in contributions:
            name = contribution.name
            node: Node = (0, 1)
            if isinstance(name, SyncName):
                node, of = (name.lo, name.hi), name.of
            part = contribution.chunks.get(chunk.index)
            nodes.append((node, part if part is not None else torch.zeros_like(like)))
        return nodes, of

    def copied(self, chunks: Sequence[int]) -> list[StateEntry]:
        """A copy of the optimizer state of these chunks, as it is now."""
        with self._lock:
            entries = [entry for index in chunks if index in self.states for entry in self.states[index].export()]
            return [(*entry[:3], entry[3].clone(), entry[4]) for entry in entries]

    def copy_states(self) -> StateCopy:
        """A copy of the optimizer state as it is now, between two updates; give it back with :meth:`drop_copy`."""
        copy = StateCopy(self.states, self._lock)
        with self._listing:
            self._copying = (*self._copying, copy)
        return copy

    def drop_copy(self, copy: StateCopy) -> None:
        """The rest of this copy is not needed."""
        with self._listing:
            self._copying = tuple(other for other in self._copying if other is not copy)
        copy.forget()

    def _copy_first(self, index: int) -> None:
        """An update is about to change the state of this chunk."""
        if self._copying:
            started = time.monotonic()
            for copy in self._copying:
                copy.keep(index)
            self.copy_s += time.monotonic() - started


def leading(contributions: Sequence[Contribution]) -> Contribution:
    """The contribution whose hyper-parameters count: the first whose worker knows its schedulers.

    A worker that has just joined has not advanced its schedulers, so its hyper-parameters may be those of the start.
    """
    return next((c for c in contributions if c.advances), contributions[0])


def used_by(contributions: Sequence[Contribution]) -> frozenset[int]:
    """The tensors of which some contribution has a gradient (or a change)."""
    return frozenset().union(*(c.used for c in contributions))
