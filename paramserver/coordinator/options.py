"""What a coordinator is told about its job when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paramserver.checkpoint.owner import Holding
from paramserver.core.versions.consistency import Consistency


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """``place``: a directory or URL; empty: no checkpoints. ``every``: steps (asynchronous: slices); 0: only the first
    and the last version. ``keep``: how many are kept. ``run``: how the job was started, for who goes on with it.
    ``holding``: by what right the place is the job's; None: nobody else comes there.
    """

    place: str = ""
    every: int = 0
    keep: int = 3
    run: dict[str, Any] | None = None
    holding: Holding | None = None

    @property
    def private(self) -> bool:
        """Whether the place goes when the job ends: nobody was promised that checkpoints stay."""
        return self.holding is not None and self.holding.private

    def ours(self, history: str) -> bool:
        """Whether checkpoints of this history are the job's."""
        return self.holding is None or self.holding.ours(history)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the coordinator is told about the job. ``slices_per_step`` 0: the number of workers it starts with."""

    job: str
    servers: int
    workers: int
    consistency: Consistency
    slices_per_step: int = 0
    seed: int = 0
    lease_s: float = 5.0
    grace_s: float = 1.0
    # How long a worker that lives may get nowhere; 0: for ever.
    stall_s: float = 8.0
    call_timeout_s: float = 30.0
    # Which server takes how much of the model; see `core.layout.placement`.
    placement: str = "auto"
    # How fast the links between hosts are, in Mb/s.
    link_mbps: float = 1000.0
    # How large a model may be.
    max_model_bytes: int = 64 << 30
    # How long the members of the start are waited for; 0: for ever.
    join_timeout_s: float = 0.0
    # How long a job waits when a server, or every worker, is gone.
    max_idle_s: float = 600.0
    # By dotted name, as text: the settings that members take over.
    settings: Mapping[str, str] = field(default_factory=dict)
    # There is a launcher that starts and ends workers.
    launched: bool = False
    # How members talk to each other, for status pages.
    security: str = "plain"
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    # What becomes of a slice that kills whoever computes it: "fail" or "skip".
    poison: str = "fail"
    # Workers keep what compression leaves out: who joins or leaves takes some of it along.
    residuals: bool = False
    # What servers hold of an earlier run is forgotten.
    forgets: bool = False

    @property
    def step_slices(self) -> int:
        """How many slices a synchronous step has; the number does not change while the job runs."""
        return self.slices_per_step or self.workers
