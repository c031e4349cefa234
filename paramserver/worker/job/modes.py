"""The mode of consistency in force, and the mode in which this worker works."""

from __future__ import annotations

from collections.abc import Iterable

from paramserver import errors
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.worker.job.member import Member


class Modes:
    """The settings that shards and coordinator have announced, and the setting of the present pace."""

    def __init__(self, member: Member) -> None:
        self._member = member
        # The newest setting that shards have told.
        self._heard: Consistency | None = None
        # The setting that the pace was made for.
        self._paced: Consistency | None = None

    @property
    def present(self) -> Consistency:
        """The newest setting that this worker has heard of, from the shards or from the coordinator."""
        announced = self._member.session.consistency()
        if self._heard is None or announced.revision > self._heard.revision:
            return announced
        return self._heard

    @property
    def together(self) -> bool:
        """Whether all shards go from one version to the next together: synchronous mode."""
        return self.present.mode is Mode.SYNC

    @property
    def revision(self) -> int:
        """Number of the setting that the pace was made for, 0 if there is no pace."""
        return self._paced.revision if self._paced else 0

    def heard(self, told: Iterable[Consistency]) -> None:
        """Shards have told these settings of their versions."""
        newest = max(told, key=lambda consistency: consistency.revision)
        if self._heard is None or newest.revision > self._heard.revision:
            self._heard = newest

    def paced(self, consistency: Consistency | None) -> None:
        """A pace was made for this setting; None: there is no pace any more."""
        self._paced = consistency

    def forget(self) -> None:
        """The job goes back: earlier answers of shards do not count."""
        self._paced = self._heard = None

    def changed(self) -> bool:
        """True if the mode in force is no longer that of the pace; a mere change of staleness is taken in here."""
        now = self.present
        if self._paced is None or now.revision == self._paced.revision:
            return False
        if now.mode is self._paced.mode is Mode.ASYNC and now.revision == self._paced.revision + 1:
            self._paced = now
            return False
        return now.mode is Mode.ASYNC or self._member.session.consistency().revision >= now.revision

    def await_revision(self, timeout_s: float) -> bool:
        """Wait for the setting after that of the pace; False if it was not announced in time."""
        member, revision = self._member, self.revision
        member.waits_for("the change of mode")
        try:
            member.run(
                member.session.wait_until(
                    lambda view: view.consistency.revision > revision, lambda view: "the change of mode", timeout_s
                )
            )
        except errors.DeadlineError:
            return False
        finally:
            member.waits_for("")
        return True
