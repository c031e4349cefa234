"""How far a worker has come, as the coordinator hears it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import median

from paramserver.v1 import coordinator_pb2, types_pb2

# So many of the last slices tell how long one usually takes.
_SLICES = 7


class Progress:
    """Written by the script's thread, read in the background."""

    def __init__(self) -> None:
        self._state = "joining"
        self._samples = self._slices = 0
        self._epoch = self._epochs_planned = 0
        self._through = self._safe = False
        self._metrics: dict[str, float] = {}
        # The slice that the script has.
        self._computing: types_pb2.SliceRef | None = None
        # How long the last slices took the script, and when the present one was handed to it (monotonic seconds).
        self._slice_times: deque[float] = deque(maxlen=_SLICES)
        self._begun_at = 0.0

    @property
    def state(self) -> str:
        """What the worker does: "joining", "registering", "training", "loading", "finishing" or "done"."""
        return self._state

    def enter(self, state: str) -> None:
        """The worker does something else from now on; see :attr:`state`."""
        self._state = state

    # ---- epochs

    @property
    def through(self) -> bool:
        """Whether the script has been through all its epochs."""
        return self._through

    @property
    def safe(self) -> bool:
        """Whether the last version that the script has trained is a checkpoint."""
        return self._safe

    @property
    def epochs_planned(self) -> int:
        """How many epochs the script has said that it wants."""
        return self._epochs_planned

    def plan(self, epochs: int) -> None:
        """The script wants so many epochs."""
        self._epochs_planned = epochs

    def in_epoch(self, epoch: int) -> None:
        """The script begins this epoch, counted from 0."""
        self._epoch = epoch

    def went_through(self, through: bool) -> None:
        """Whether the script has been through all its epochs."""
        self._through = through

    def is_safe(self) -> None:
        """The last version that the script has trained is a checkpoint."""
        self._safe = True

    # ---- slices

    @property
    def slices(self) -> int:
        """How many slices this worker has computed."""
        return self._slices

    @property
    def samples(self) -> int:
        """Of how many samples."""
        return self._samples

    def begun(self) -> None:
        """A slice begins."""
        self._begun_at = time.monotonic()

    def computes(self, slice_: types_pb2.SliceRef | None) -> None:
        """The slice that the script has, None if it has none."""
        self._computing = slice_

    def computed(self, stalled_s: float) -> None:
        """The script has computed its slice, and has waited so long for weights meanwhile."""
        # Weights may have been waited for since before the slice began.
        self._slice_times.append(max(0.0, time.monotonic() - self._begun_at - stalled_s))

    def hands_in(self, samples: int) -> None:
        """A slice of so many samples is about to be handed in."""
        self._computing = None
        self._slices += 1
        self._samples += samples

    # ---- what is reported

    def log(self, numbers: Mapping[str, float]) -> None:
        """Numbers of the script; the last one of each name counts."""
        # Replaced as a whole, since the background reads it.
        self._metrics = {**self._metrics, **numbers}

    def report(self) -> coordinator_pb2.WorkerReport:
        """All of it, but for what others know."""
        return coordinator_pb2.WorkerReport(
            epoch=self._epoch,
            samples=self._samples,
            slices=self._slices,
            state=self._state,
            metrics=dict(self._metrics),
            epochs_planned=self._epochs_planned,
            computing=self._computing,
            at_work=self._state == "training" and not self._through,
            slice_s=median(times) if (times := list(self._slice_times)) else 0.0,
        )
