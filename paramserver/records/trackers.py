"""Trackers of experiments: an adapter of a few lines for each. A tracker's package is imported where it is opened."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paramserver.core.records.steps import StepValues


@dataclass(frozen=True, slots=True)
class RunFacts:
    """``key``: the same for all coordinators of a job, and for the jobs that go on from its checkpoints with --resume.

    ``job``: the name of the first of them. ``settings``: by dotted name.
    """

    job: str
    key: str
    settings: Mapping[str, str]


class Tracker(Protocol):
    """All calls come from one thread. Any exception ends the use of the tracker, not the training."""

    name: str

    def open(self) -> None:
        """Begin the run, or go on with the run of an earlier coordinator."""

    def log(self, step: StepValues, at: float) -> None:
        """A step was closed at ``at`` (seconds since 1970). Steps come again where the job goes back."""

    def close(self) -> None:
        """End the run, after the last step."""


class TensorBoard:
    """Event files in ``runs/JOB``."""

    name = "tensorboard"

    def __init__(self, facts: RunFacts) -> None:
        self._directory = f"runs/{facts.job}"
        self._writer: Any = None
        self._timeline = 0

    def open(self) -> None:
        """See `Tracker`."""
        self._begin(None)

    def _begin(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._directory, purge_step=purge_step)

    def log(self, step: StepValues, at: float) -> None:
        """See `Tracker`. What was written before the job went back is hidden."""
        if step.timeline > self._timeline:
            self._timeline = step.timeline
            self._writer.close()
            self._begin(step.step)
        for name, value in step.values.items():
            self._writer.add_scalar(name, value, step.step, at)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class WandB:
    """Weights & Biases. Its variables, such as WANDB_MODE and WANDB_PROJECT, are those of the coordinator's process."""

    name = "wandb"

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._run: Any = None

    def open(self) -> None:
        """See `Tracker`."""
        import wandb

        facts = self._facts
        self._run = wandb.init(id=facts.key, name=facts.job, resume="allow", config=dict(facts.settings))
        # W&B's own step cannot go back, so the step is a value of its own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: StepValues, at: float) -> None:
        """See `Tracker`."""
        self._run.log({**step.values, "step": step.step})

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class MLflow:
    """MLflow. Its variables, such as MLFLOW_TRACKING_URI, are those of the coordinator's process."""

    name = "mlflow"

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._mlflow: Any = None

    def open(self) -> None:
        """See `Tracker`. The run of an earlier coordinator is found by a tag."""
        import mlflow

        self._mlflow, facts = mlflow, self._facts
        tag = f"tags.paramserver = '{facts.key}'"
        found = mlflow.search_runs(filter_string=tag, output_format="list", max_results=1)
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
        else:
            mlflow.start_run(run_name=facts.job, tags={"paramserver": facts.key})
            mlflow.log_params(dict(facts.settings))

    def log(self, step: StepValues, at: float) -> None:
        """See `Tracker`. Characters that MLflow refuses in names become "_"."""
        values = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in step.values.items()}
        self._mlflow.log_metrics(values, step=step.step)

    def close(self) -> None:
        """See `Tracker`."""
        self._mlflow.end_run()


class Trackio:
    """trackio: a local data base, or a Space of Hugging Face."""

    name = "trackio"

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._run: Any = None

    def open(self) -> None:
        """See `Tracker`."""
        import trackio

        facts = self._facts
        name = f"{facts.job}-{facts.key}"
        self._run = trackio.init(project="paramserver", name=name, resume="allow", config=dict(facts.settings))

    def log(self, step: StepValues, at: float) -> None:
        """See `Tracker`."""
        self._run.log(dict(step.values), step=step.step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


# By name: the adapter, and the modules that must be there.
TRACKERS: Mapping[str, tuple[Callable[[RunFacts], Tracker], tuple[str, ...]]] = {
    "tensorboard": (TensorBoard, ("torch.utils.tensorboard", "tensorboard")),
    "wandb": (WandB, ("wandb",)),
    "mlflow": (MLflow, ("mlflow",)),
    "trackio": (Trackio, ("trackio",)),
}
