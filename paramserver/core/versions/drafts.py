"""The state machine of a shard's drafts: a draft is the next version, made chunk by chunk before its step is complete.

A link carries both ways at once, so weights should go out while gradients still come in. A *draft* is what the next
version will be if it is made of the contributions that are arriving. A draft decides nothing: the shard decides as
always which contributions a version is made of. If the draft was made of the same contributions, it is that version.
Otherwise it is forgotten.

- Begun: when the contributions that have begun to arrive cover the open step. Contributions to other steps are left
  aside, and so are contributions that overflowed, have no samples or are clipped.
- Made of: one contribution for each slice, the first that begins to arrive. A worker may begin a contribution anew.
- A chunk is made: when all contributions have brought it.
- Forgotten: when one of its contributions fails or is begun anew, or when its arithmetic fails.

The shell keeps contributions and tensors. It gives each contribution a number, tells what happens, and performs the
effects in their order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paramserver.core.layout.thresholds import DRAFT_BYTES
from paramserver.core.versions.names import Name, SyncName
from paramserver.core.versions.reduction import is_node

# ---- events


@dataclass(frozen=True, slots=True)
class Opened:
    """Version ``step`` is published; contributions to this step come next."""

    step: int


@dataclass(frozen=True, slots=True)
class Begun:
    """Contribution ``part`` of a worker begins to arrive. ``lacks``: the chunks that it is still to bring.

    ``plain``: its gradients are summed and applied as they are. False if it overflowed, has no samples or is clipped.
    """

    part: int
    name: Name
    worker: int
    lacks: frozenset[int]
    plain: bool = True


@dataclass(frozen=True, slots=True)
class Came:
    """Contribution ``part`` has brought a chunk."""

    part: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Contribution ``part`` will not bring the chunks that it lacks."""

    part: int


@dataclass(frozen=True, slots=True)
class Decided:
    """The shard makes the next version of these contributions."""

    parts: Collection[int]


@dataclass(frozen=True, slots=True)
class NotMade:
    """The arithmetic of a draft failed, or nobody needs it any more."""

    draft: int


Event = Opened | Begun | Came | Failed | Decided | NotMade

# ---- effects


@dataclass(frozen=True, slots=True)
class Begin:
    """Draft number ``draft`` begins, made of these contributions, which are in the order of their slices."""

    draft: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Make:
    """Compute a chunk of the present draft: all of its contributions have brought this chunk."""

    draft: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The draft will be no version."""

    draft: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """The draft is the next version. The shell computes the chunks that it has not made yet."""

    draft: int


Effect = Begin | Make | Forget | Adopt


class DraftState:
    """The drafts of one shard, at most one at a time. All changes go through :meth:`handle`.

    ``chunks``: those that are drafted. ``nbytes``: of all that change with versions; smaller shards are not drafted.
    """

    def __init__(self, chunks: Sequence[int], nbytes: int) -> None:
        self._chunks, self._large = dict.fromkeys(chunks), nbytes >= DRAFT_BYTES
        self._numbers = itertools.count(1)
        # None while a version is made.
        self._step: int | None = None
        # The contributions of which a draft can be made, and by slice of the step, which of them has it.
        self._parts: dict[int, Begun] = {}
        self._covered: dict[int, int] = {}
        # The chunks that each contribution lacks.
        self._lacks: dict[int, set[int]] = {}
        # The present draft (0: none). By chunk, how many of its contributions lack it.
        self._draft = 0
        self._lacking: Counter[int] = Counter()

    def has(self, part: int) -> bool:
        """Whether drafts are made of this contribution."""
        return part in self._parts

    def handle(self, event: Event) -> list[Effect]:
        """Take an event in; return the effects, in order."""
        match event:
            case Opened(step):
                self._step = step
                return []
            case Begun():
                return self._begun(event)
            case Came(part, chunk):
                return self._came(part, chunk)
            case Failed(part):
                return self._failed(part)
            case Decided(parts):
                return self._decided(parts)
            case NotMade(draft):
                return self._forget() if draft == self._draft else []

    def _begun(self, event: Begun) -> list[Effect]:
        name = event.name
        if not (self._large and event.plain and isinstance(name, SyncName) and name.step == self._step):
            return []
        if not is_node(name.lo, name.hi, name.of):
            return []
        slices = range(name.lo, name.hi)
        others = sorted({self._covered[slice_] for slice_ in slices if slice_ in self._covered})
        if any(self._parts[other].worker != event.worker for other in others):
            return []
        effects = [effect for other in others for effect in self._failed(other)]
        self._parts[event.part], self._lacks[event.part] = event, set(event.lacks)
        self._covered.update(dict.fromkeys(slices, event.part))
        return effects + self._begin() if len(self._covered) == name.of else effects

    def _begin(self) -> list[Effect]:
        self._lacking = Counter(chunk for lacks in self._lacks.values() for chunk in lacks)
        if not self._lacking:
            return []  # the version itself is about to be made
        self._draft = next(self._numbers)
        parts = tuple(dict.fromkeys(part for _, part in sorted(self._covered.items())))
        ready = [Make(self._draft, chunk) for chunk in self._chunks if not self._lacking[chunk]]
        return [Begin(self._draft, parts), *ready]

    def _came(self, part: int, chunk: int) -> list[Effect]:
        lacks = self._lacks.get(part, ())
        if chunk not in lacks:
            return []
        self._lacks[part].remove(chunk)
        if not self._draft:
            return []
        self._lacking[chunk] -= 1
        return [] if self._lacking[chunk] or chunk not in self._chunks else [Make(self._draft, chunk)]

    def _failed(self, part: int) -> list[Effect]:
        if part not in self._parts:
            return []
        del self._parts[part], self._lacks[part]
        self._covered = {slice_: other for slice_, other in self._covered.items() if other != part}
        return self._forget()

    def _decided(self, parts: Collection[int]) -> list[Effect]:
        draft, same = self._draft, self._parts.keys() == set(parts)
        self._step, self._draft = None, 0
        self._parts.clear()
        self._lacks.clear()
        self._covered.clear()
        if not draft:
            return []
        return [Adopt(draft) if same else Forget(draft)]

    def _forget(self) -> list[Effect]:
        draft, self._draft = self._draft, 0
        return [Forget(draft)] if draft else []
