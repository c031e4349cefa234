"""The versions that a shard has published: which are kept, and which is the newest one that may be given."""

from __future__ import annotations

from paramserver.core.versions.events import StandsAt

# A worker that was handed version t may still need it until all shards have published t + 1.
KEPT_VERSIONS = 2


class Published:
    """The published versions of one timeline."""

    def __init__(self) -> None:
        # Oldest first.
        self.kept: tuple[int, ...] = ()
        # The version that nobody may have before a plan is settled; and the newest settled plan.
        self._stand: StandsAt | None = None
        self._settled_plan = 0

    def begin(self, version: int) -> None:
        """A timeline begins with this version."""
        self.kept = (version,)

    def add(self, version: int) -> None:
        """This version stands."""
        self.kept = (*self.kept, version)

    def drop_old(self, kept: int, spared: int | None) -> list[int]:
        """Keep the newest ``kept`` versions, and ``spared``. Returns the others."""
        old = [version for version in self.kept[:-kept] if version != spared]
        if old:
            self.kept = (*(version for version in self.kept[:-kept] if version == spared), *self.kept[-kept:])
        return old

    def stand_at(self, stand: StandsAt) -> None:
        """The version is given to no worker until the plan is settled, unless the plan is settled already."""
        if stand.plan > self._settled_plan:
            self._stand = stand

    def settle(self, plan: int) -> None:
        """The plans up to this one are in force, or were given up."""
        self._settled_plan = max(self._settled_plan, plan)
        if self._stand is not None and self._stand.plan <= plan:
            self._stand = None

    def stands(self, plan: int, version: int) -> bool:
        """Whether nobody gets ``version`` before this plan is settled."""
        return self._stand == StandsAt(plan, version)

    @property
    def at_stand(self) -> bool:
        """Whether workers wait for the newest version until a plan is settled."""
        return self._stand is not None and bool(self.kept) and self.kept[-1] >= self._stand.version

    @property
    def given(self) -> int:
        """The newest version that anybody may have. There is one."""
        return self.kept[-1] if self._stand is None else min(self.kept[-1], self._stand.version - 1)
