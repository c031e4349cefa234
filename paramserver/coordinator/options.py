"""The options of a job that its coordinator is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paramserver.checkpoint.owner import Holding
from paramserver.core.layout.lr_scaling import LrScaling
from paramserver.core.versions.consistency import Consistency


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """``place``: a directory or URL; empty: no checkpoints. ``every``: steps (asynchronous: slices) between two; 0:
    ``every_s`` seconds between two; with both 0 only the first and the last version. ``keep``: how many are kept.
    ``run``: how the job was started, written into each manifest. ``holding``: the job's claim to the place; None: no
    other job uses it. ``multiple``: synchronous versions that may be saved are multiples of it. ``best_metric``: a name
    in ``ctx.log``; the ``best_keep`` checkpoints with its lowest ("min") or highest ("max") values are kept, too.
    ``sparing``: with ``every_s``, checkpoints take a small part of the time only, and come more seldom if they take
    long. ``rising``: the first ones come sooner than after ``every_s``, so that a loss costs a part of the time so far.
    """

    place: str = ""
    every: int = 0
    keep: int = 3
    run: dict[str, Any] | None = None
    holding: Holding | None = None
    every_s: float = 0.0
    multiple: int = 1
    best_metric: str = ""
    best_mode: str = "min"
    best_keep: int = 1
    sparing: bool = False
    rising: bool = False

    @property
    def private(self) -> bool:
        """Whether the place is removed when the job ends, so that no checkpoint was promised to last."""
        return self.holding is not None and self.holding.private

    def ours(self, history: str) -> bool:
        """Whether checkpoints of this history are the job's."""
        return self.holding is None or self.holding.ours(history)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of one job. ``slices_per_step`` 0: as many as the workers that the job starts with."""

    job: str
    servers: int
    workers: int
    consistency: Consistency
    slices_per_step: int = 0
    seed: int = 0
    lease_s: float = 5.0
    grace_s: float = 1.0
    # For how long a live worker may hand in nothing; 0: for ever.
    stall_s: float = 8.0
    call_timeout_s: float = 30.0
    # How the model is dealt out to servers; see `core.layout.placement`.
    placement: str = "auto"
    # How fast the links between hosts are, in Mb/s.
    link_mbps: float = 1000.0
    # How many further servers hold a copy of each shard, and at which rate a new copy is brought (Mb/s; 0: no limit).
    replicas: int = 0
    repair_mbps: float = 0.0
    # How large a model may be.
    max_model_bytes: int = 64 << 30
    # For how long the start waits for its members; 0: for ever.
    join_timeout_s: float = 0.0
    # For how long a job waits if a server is gone, or every worker.
    max_idle_s: float = 600.0
    # The settings that members take over, as text by dotted name.
    settings: Mapping[str, str] = field(default_factory=dict)
    # Whether there is a launcher, which starts and ends workers.
    launched: bool = False
    # How connections are secured, for status pages.
    security: str = "plain"
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    # A slice at which each worker dies ends the job ("fail") or counts without its samples ("skip").
    poison: str = "fail"
    lr_scaling: LrScaling = field(default_factory=LrScaling)
    # Whether workers keep what compression leaves out, so that a part of it is lost with each worker that leaves.
    residuals: bool = False
    # Whether layers take statistics over all slices of a step, so that the job has to stay synchronous.
    sync_batchnorm: bool = False

    @property
    def step_slices(self) -> int:
        """How many slices a synchronous step has; the number does not change while the job runs."""
        return self.slices_per_step or self.workers
