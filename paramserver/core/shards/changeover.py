"""A change of the setting, as one shard sees it: prepared for a version that lies ahead, then committed or aborted."""

from __future__ import annotations

from paramserver.core.versions.consistency import Consistency


class Changeover:
    """At most one setting that is not in force yet."""

    def __init__(self) -> None:
        self.scheduled: Consistency | None = None
        self._committed = False
        self._aborted_revision = 0

    @property
    def committed(self) -> bool:
        """Whether the scheduled setting is agreed on."""
        return self.scheduled is not None and self._committed

    def may_prepare(self, consistency: Consistency, revision: int) -> bool:
        """Whether this setting is news, and no other one is agreed on. ``revision``: of the setting in force."""
        return consistency.revision > max(revision, self._aborted_revision) and not self.committed

    def prepare(self, consistency: Consistency) -> None:
        """The setting may come: the version before which it is to come is held back."""
        self.scheduled, self._committed = consistency, False

    def agree(self, consistency: Consistency) -> None:
        """The setting comes."""
        self.scheduled, self._committed = consistency, True

    def commit(self, revision: int, consistency: Consistency | None, in_force: int) -> bool:
        """All shards have prepared this revision; False if it is over here. ``consistency``: what it is, if told."""
        if consistency is not None and self.scheduled is None and revision > max(in_force, self._aborted_revision):
            self.scheduled = consistency
        if self.scheduled is None or self.scheduled.revision != revision:
            return False
        self._committed = True
        return True

    def abort(self, revision: int) -> None:
        """Forget settings up to this revision, unless they are agreed on."""
        self._aborted_revision = max(self._aborted_revision, revision)
        if self.scheduled is not None and self.scheduled.revision <= revision and not self._committed:
            self.scheduled = None

    def holds(self, version: int) -> bool:
        """Whether making this version would cross a boundary that is not committed yet."""
        return self.scheduled is not None and not self._committed and version >= self.scheduled.from_version

    def take(self, version: int) -> Consistency | None:
        """The setting that comes into force now that this version stands, if there is one."""
        scheduled = self.scheduled
        if scheduled is None or not self._committed or scheduled.from_version > version:
            return None
        self.scheduled = None
        return scheduled
