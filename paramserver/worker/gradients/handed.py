"""Counts what becomes of contributions without a data set, which no other worker can repeat, for the job's accounts."""

from __future__ import annotations

import concurrent.futures

from paramserver import errors
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.worker.gradients.contribution import Outcomes


class HandedIn:
    """Counts the contributions of one worker on the present timeline. Written in any thread, where answers come in."""

    def __init__(self) -> None:
        self._pushed = self._counted = self._late = self._duplicate = self._again = 0

    def begin_again(self) -> None:
        """Another timeline begins: earlier contributions are undone, and the script has heard of it."""
        self._pushed = self._counted = self._late = self._duplicate = self._again = 0

    def pushed(self, push: concurrent.futures.Future[Outcomes]) -> None:
        """A contribution is on its way; its answer counts, whether or not the script still waits for it."""
        self._pushed += 1
        push.add_done_callback(self._answered)

    def _answered(self, push: concurrent.futures.Future[Outcomes]) -> None:
        if push.cancelled():
            return
        error = push.exception()
        if error is None:
            if push.result() == {shard_pb2.OUTCOME_DUPLICATE}:
                self._duplicate += 1
            elif push.result() == {shard_pb2.OUTCOME_ACCEPTED}:
                self._counted += 1
        elif type(error) is errors.StaleViewError:
            self._late += 1

    def passed_over(self) -> None:
        """A contribution was not sent: its step was complete, or another worker had brought the same name."""
        self._pushed += 1
        self._duplicate += 1

    def handed_in_again(self) -> None:
        """A contribution that did not count is handed in under another name."""
        self._again += 1

    def message(self, timeline: int, unsent: int) -> coordinator_pb2.Tally:
        """The counts for the coordinator. ``unsent``: slices that were handed in and wait for others of their step."""
        duplicates = min(self._duplicate, self._again)
        return coordinator_pb2.Tally(
            timeline=timeline,
            handed_in=self._pushed - self._again,
            counted=self._counted,
            late=max(0, self._late - (self._again - duplicates)),
            duplicate=self._duplicate - duplicates,
            unsent=unsent,
        )
