"""A worker's progress, as the coordinator hears it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import median

from paramserver.v1 import coordinator_pb2, types_pb2

# The usual time of a slice is the median over so many slices.
_SLICES = 7


class Progress:
    """Written by the script's thread, read in the background."""

    def __init__(self) -> None:
        # "joining", "registering", "training", "loading", "finishing" or "done".
        self.state = "joining"
        # How many slices this worker has computed, and of how many samples.
        self.slices = self.samples = 0
        self._epoch = self.epochs_planned = 0
        # Whether the script has been through all its epochs, and whether the last version of them is a checkpoint.
        self.through = self.safe = False
        # The version of the weights with which the script was told last that another worker is the main one; else -1.
        self.not_main_at = -1
        self._metrics: dict[str, float] = {}
        # The slice that the script has.
        self._computing: types_pb2.SliceRef | None = None
        # How long the last slices took the script, and when the present one was handed to it (monotonic seconds).
        self._slice_times: deque[float] = deque(maxlen=_SLICES)
        self._begun_at = 0.0

    def enter(self, state: str) -> None:
        """The worker is in this state from now on."""
        self.state = state

    # ---- epochs

    def plan(self, epochs: int) -> None:
        """The script wants so many epochs."""
        self.epochs_planned = epochs

    def in_epoch(self, epoch: int) -> None:
        """The script begins this epoch, counted from 0."""
        self._epoch = epoch

    def went_through(self, through: bool) -> None:
        """Whether the script has been through all its epochs."""
        self.through = through

    def is_safe(self) -> None:
        """The last version that the script has trained is a checkpoint."""
        self.safe = True

    def told(self, main: bool, version: int) -> None:
        """The script is told whether this worker is the main one; it has the weights of this version."""
        self.not_main_at = -1 if main else version

    # ---- slices

    def begun(self) -> None:
        """A slice begins."""
        self._begun_at = time.monotonic()

    def computes(self, slice_: types_pb2.SliceRef | None) -> None:
        """The slice that the script has, None if it has none."""
        self._computing = slice_

    def computed(self, stalled_s: float) -> None:
        """The script has computed its slice, and has waited ``stalled_s`` seconds for weights meanwhile."""
        # The wait for weights may have begun before the slice.
        self._slice_times.append(max(0.0, time.monotonic() - self._begun_at - stalled_s))

    def hands_in(self, samples: int) -> None:
        """A slice of so many samples is about to be handed in."""
        self._computing = None
        self.slices += 1
        self.samples += samples

    # ---- the report

    def log(self, numbers: Mapping[str, float]) -> None:
        """Numbers of the script; the last number of each name counts."""
        # Replaced as a whole, since the background reads it.
        self._metrics = {**self._metrics, **numbers}

    def report(self) -> coordinator_pb2.WorkerReport:
        """This progress as a message; the engine adds the facts of other parts."""
        return coordinator_pb2.WorkerReport(
            epoch=self._epoch,
            samples=self.samples,
            slices=self.slices,
            state=self.state,
            metrics=dict(self._metrics),
            first_metric=next(iter(self._metrics), ""),
            epochs_planned=self.epochs_planned,
            computing=self._computing,
            at_work=self.state == "training" and not self.through,
            slice_s=median(times) if (times := list(self._slice_times)) else 0.0,
        )
