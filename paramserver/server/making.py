"""How a version is made of the one before it and contributions: the sum, its clipping, the update, and the memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from paramserver.core.layout.plan import Kind
from paramserver.server.arithmetic import norms
from paramserver.server.arithmetic.norms import NormExchange
from paramserver.server.replicas.outbox import Content
from paramserver.server.traced import ShardTrace
from paramserver.server.versions.drafting import Draft
from paramserver.server.versions.shard import Contribution, ShardTensors, leading
from paramserver.server.versions.sharing import Space, own
from paramserver.server.versions.version import Version, again

T = TypeVar("T")
Shared: TypeAlias = Callable[[], Space | None]


class Arithmetic(Protocol):
    """Computes with the shard's tensors, one thing after the other."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class Maker:
    """The versions of one shard in the making. One at a time."""

    def __init__(
        self,
        tensors: ShardTensors,
        exchange: NormExchange,
        arithmetic: Arithmetic,
        trace: ShardTrace,
    ) -> None:
        self._tensors, self._norms = tensors, exchange
        self._arithmetic, self._trace = arithmetic, trace
        # Memory for the next version, by chunk.
        self._spare: dict[int, Tensor] = {}

    def reuse(self, tensors: dict[int, Tensor]) -> None:
        """These tensors of a former version have no reader any more: the next version may lie in their memory."""
        self._spare = tensors

    async def given(
        self, timeline: int, base: Version, contributions: Sequence[Contribution], content: Content | None
    ) -> Mapping[int, Tensor] | None:
        """The gradients to apply, by chunk, in ``content`` if given; None if the update sums contributions up."""
        if contributions[0].combined:
            return contributions[0].chunks
        limit = leading(contributions).clip_norm
        if limit <= 0:
            return None
        tensors, trace = self._tensors, self._trace
        began = trace.recorder.now() if trace.recorder.on else 0
        combined = await self._arithmetic(lambda: tensors.combined(base, contributions, content))
        if began:
            trace.made("sum", base.number, began)
        chunks = tensors.layout.chunks
        gradients = {index: made for index, made in combined.items() if chunks[index].kind is Kind.PARAMETER}
        mine = await self._arithmetic(lambda: norms.squares(gradients))
        everybodys = await self._norms.exchange(timeline, base.number, mine)
        inside = content is not None
        return {**combined, **await self._arithmetic(lambda: norms.clip(gradients, everybodys, limit, inside))}

    async def make(
        self,
        base: Version,
        contributions: Sequence[Contribution],
        given: Mapping[int, Tensor] | None,
        shared: Shared | None,
        draft: Draft | None,
        content: Content | None,
    ) -> tuple[Version, bool]:
        """The next version, and whether it lies in ``shared``.

        ``shared``, called in another thread, gives memory shared with workers, or None if there is none.
        ``content`` is filled with what is applied, as far as it is not in ``given``.
        """
        spare, self._spare = self._spare, {}
        return await self._arithmetic(lambda: self._made(base, contributions, given, shared, draft, content, spare))

    def _made(
        self,
        base: Version,
        contributions: Sequence[Contribution],
        given: Mapping[int, Tensor] | None,
        shared: Shared | None,
        draft: Draft | None,
        content: Content | None,
        spare: dict[int, Tensor],
    ) -> tuple[Version, bool]:
        """The same, in the arithmetic thread. ``spare``: memory that may be used, by chunk."""
        trace = self._trace
        began = trace.recorder.now() if trace.recorder.on else 0
        lent = shared() if shared is not None else None
        space = lent if lent is not None or not spare else again(spare, base)
        made = draft.made if draft is not None and draft.content is content else None
        version = self._tensors.build(base, contributions, given, space, made, content)
        if draft is not None:
            draft.becomes(version)
        if lent is None and base.slot is not None and not version.same_as(base):
            # None of its tensors may lie in a slot that another version will use.
            version.tensors = own(version.tensors, base.tensors, [chunk.index for chunk in version.moving(False)])
        if began:
            trace.made("sum and update" if given is None else "update", base.number, began, draft is not None)
        return version, lent is not None
