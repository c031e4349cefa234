"""Promises that the job does not keep: for the time being (troubles), or for good (broken promises)."""

from __future__ import annotations

from paramserver.v1 import coordinator_pb2


class Promises:
    """Two lists of sentences that say what happened and what to do. The part that adds a sentence removes it again.

    A *trouble* makes the job ``degraded`` in `status` for as long as it lasts, such as a checkpoint that is overdue. A
    *broken promise* makes the run end with an exit code other than 0, such as a last checkpoint that is missing.
    """

    def __init__(self) -> None:
        # Each by a key that the part chooses.
        self.troubles: dict[str, str] = {}
        self.broken: dict[str, str] = {}

    def store_takes(self, error: str) -> None:
        """The store does not take the job's state, for this reason; empty: it does again."""
        if error:
            self.troubles["store"] = (
                f"the job's state is not in the store, so no other coordinator could take the job over now: {error}"
            )
        else:
            self.troubles.pop("store", None)

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on with the broken promises that an earlier coordinator has recorded."""
        self.broken = dict(record.broken_promises)
