"""The answers of `/api/v1`, as typed models. `paramserver status --json` prints `Status`.

A field is only ever added. A field that changes its meaning gets a new version of the API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

from paramserver.core import shown

Staleness = Annotated[int, Field(ge=0)] | Literal["unbounded"]


def _is_none(value: object) -> bool:
    return value is None


class Model(BaseModel):
    """A part of an answer. Numbers that are not finite are the texts "NaN", "Infinity" and "-Infinity".

    Texts are harmless for terminals and pages (see `core.shown`).
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _harmless(cls, found: Any) -> Any:
        return shown.values(found)


class WaitedStep(Model):
    """A step that waited noticeably."""

    step: int = Field(description="The version that it began with; asynchronous mode: the clock of the slowest worker.")
    asynchronous: bool
    waited_s: float = Field(description="For so many seconds all others were there.")
    member: str = Field(description="The worker or server it waited for; empty: the data does not say.")
    slices: str = Field(description='The slices that were missing, such as "5" or "4 to 7"; empty: none, or not known.')
    cause: str = Field(description="One of the causes of docs/blame.md.")
    cause_s: float = Field(description="How many of the seconds the cause explains.")
    sentence: str = Field(description="The same in words.")
    at_s: float = Field(description="When it was judged: seconds since 1970 by the coordinator's clock.")


class HeldWorker(Model):
    """Asynchronous mode: a worker that was held at the staleness bound, and by whom."""

    worker: str
    by: str
    times: int
    seconds: float


class Waits(Model):
    """Which steps waited, and for whom (docs/blame.md), as far as the coordinator that answers has heard."""

    worst: list[WaitedStep] = Field(description="The ten steps that waited longest, the longest first.")
    held: list[HeldWorker] = Field(description="The longest first.")
    staleness: list[int] = Field(
        description="Asynchronous mode: how many slices were computed on weights that lacked 0, 1, 2 ... updates."
    )
    steps: int = Field(description="Steps that were looked at.")
    waited_s: float = Field(description="For how long all but one worker were there, in all these steps together.")
    usual_s: float = Field(description="How long a step usually takes without its wait; 0: not known yet.")


class ServerCounts(Model):
    """Counters of a server since its process began; sums over its shards where these are bytes."""

    applied: int = Field(description="Slices that its versions contain.")
    duplicate: int = Field(description="Contributions that another one had been faster than.")
    skipped: int = Field(description="Steps without an update, since a number was not finite.")
    refused: int = Field(description="Contributions that were not taken.")
    bytes_pushed: int = Field(description="Bytes of gradients received.")
    bytes_pulled: int = Field(description="Bytes of weights sent.")
    max_clock_spread: int = Field(description="Asynchronous mode: the largest lead of one worker over another.")
    shard_bytes: int = Field(description="Bytes of weights that the server holds.")


class Process(Model):
    """One process of the job, also one that is gone."""

    role: str = Field(description='"coordinator", "server" or "worker".')
    name: str = Field(description="Its name in the job, such as worker-3.")
    pid: int
    address: str = Field(description='"host:port" where it takes calls; empty: nowhere.')
    state: str = Field(description="One of the eight states of docs/deploy.md.")
    reason: str = Field(description="Why it is in this state, for people; may be empty.")
    gone: bool = Field(description="Whether it is a member no more.")
    version: int = Field(description="The newest version of the weights that it has.")
    clock: int = Field(description="Slices that a worker has finished.")
    epoch: int = Field(description="The epoch a worker is in, from 0.")
    samples: int = Field(description="Samples that workers of this name have computed.")
    slices: int = Field(description="Slices that workers of this name have computed.")
    waiting_for: str = Field(description="What it waits for, for people; empty: nothing.")
    transport: str = Field(description="How a worker talks to the servers.")
    transport_reason: str = Field(description="Why a worker shares no memory with servers; empty: it does.")
    host_tier: str = Field(
        description="How a worker has part in the one pull of its host; empty: it is alone there, or near the servers."
    )
    restart_command: str = Field(description="The command that starts it again.")
    metrics_url: str = Field(description="Where it serves metrics about itself; empty: nowhere.")
    member: int = Field(description="Its number in the job; another process of the same name has another number.")
    samples_per_s: float = Field(description="Of a worker, over the last seconds.")
    bytes_per_s: float = Field(description="Of a server: gradients received and weights sent, over the last seconds.")
    metrics: dict[str, float] = Field(description="The values that the script logged last with ctx.log.")
    phases: dict[str, float] | None = Field(
        default=None, exclude_if=_is_none, description="Of a worker: seconds by phase; gc, starved, paused are parts."
    )
    phase: str = Field(default="", description='What a worker does now: a key of phases, such as "data".')
    phase_s: float = Field(default=0.0, description="For how many seconds it has done so.")
    server: ServerCounts | None = Field(default=None, exclude_if=_is_none, description="Of servers only.")


class Backup(Model):
    """A copy of a shard."""

    server: str
    whole: bool = Field(description="Whether it has all of the shard.")
    share: float = Field(description="How much of the shard it has, from 0 to 1.")


class Shard(Model):
    """The servers that hold a shard. Only jobs with replicas have a list of them."""

    shard: int
    state: str = Field(description='"replicated", "catching up", "no backup" or "lost".')
    primary: str
    backups: list[Backup]


class Status(Model):
    """Where the job stands and why, and all its processes."""

    job: str = Field(description="The name of the job.")
    sentence: str = Field(description="The state of the job in one sentence.")
    state: str = Field(description="One of the eight states of docs/deploy.md.")
    reason: str = Field(description="Why the job is in this state, for people; may be empty.")
    mode: str | None = Field(description='"sync" or "async"; null: not known yet.')
    staleness: Staleness | None = Field(description="Asynchronous mode only: how far a worker may be ahead.")
    version: int = Field(description="The newest version of the weights.")
    epoch: int = Field(description="The epoch of the slowest worker, from 0.")
    epochs: int = Field(description="The epochs that the scripts plan; 0: not known.")
    slices_done: int = Field(description="Slices that have counted, of slices_planned.")
    slices_planned: int = Field(description="Slices of all epochs; 0: not known.")
    samples: int = Field(description="Samples that workers have computed.")
    samples_per_s: float = Field(description="Of all workers together, over the last seconds.")
    metrics: dict[str, float] = Field(description="What scripts logged last with ctx.log: the mean over the workers.")
    blame: list[str] = Field(default=[], description="Who holds whom up, in sentences; empty: nothing is known.")
    waits: Waits = Field(description="Which steps waited, for how long, for whom, and why.")
    generation: int
    term: int = Field(description="The number of the coordinator's leadership; 0: this coordinator does not lead.")
    security: str = Field(description='"tls", "plain" or "insecure".')
    timeline: int
    slices_per_step: int
    steps_per_epoch: int
    effective_batch: int = Field(description="Samples in an update, if its slices are full; 0: not known.")
    lr_factor: float = Field(description="What training.lr_scaling multiplies learning rates by now.")
    lr_factor_whole: float = Field(description="The same after the warm-up.")
    expected_servers: int
    expected_workers: int
    troubles: dict[str, str] = Field(description="What is wrong now and may pass, in sentences.")
    broken_promises: dict[str, str] = Field(description="Promises that the job cannot keep any more, in sentences.")
    poisoned_slices: list[str]
    lost: list[str] = Field(description="Members that were lost and that nobody has replaced.")
    losses: int = Field(description="How many members have ever been lost.")
    checkpoint: str = Field(description="The newest complete checkpoint; empty: none.")
    rollbacks: int
    steps_redone: int
    store: str
    store_operations: int
    uptime_s: float
    said: list[str] = Field(
        default=[], description="The last lines of the run, when it has ended; nothing changes after that."
    )
    dashboard: str = Field(description="The address of the page and of this API; empty: there is none.")
    takeovers: int | None = Field(default=None, exclude_if=_is_none, description="Jobs with replicas only.")
    repairs: int | None = Field(default=None, exclude_if=_is_none, description="Jobs with replicas only.")
    shards: list[Shard] | None = Field(default=None, exclude_if=_is_none, description="Jobs with replicas only.")
    processes: list[Process]


class Event(Model):
    """One thing that has happened to the job."""

    at_s: float = Field(description="Seconds since 1970 by the coordinator's clock.")
    kind: str = Field(
        description='"begun", "taken over", "state", "joined", "left", "lost", "takeover", "went back", "mode" or '
        '"checkpoint".'
    )
    subject: str = Field(description="The process that the event is about; empty: the job.")
    text: str = Field(description="One sentence for people.")
    version: int = Field(description="The newest version at that time.")


class Events(Model):
    """The newest events, oldest first: at most a hundred. They outlive the coordinator that saw them."""

    events: list[Event]


class Series(Model):
    """Values over time, in columns of equal length: at most 600 moments, thinned out evenly as the job gets older.

    The columns begin with the process of the coordinator that answers.
    """

    at_s: list[float] = Field(description="Seconds since 1970.")
    version: list[int]
    samples_per_s: list[float]
    values: dict[str, list[float | None]] = Field(
        description="Values of ctx.log by name, the mean over the workers. null: none, or no finite number."
    )


class Update(Model):
    """A message of `/api/v1/stream`: the newest status, its moment in the series, and new events."""

    status: Status
    at_s: float
    events: list[Event] = Field(description="All kept events in the first message, later only new ones.")


class LedgerEpoch(Model):
    """How often the samples of one epoch have counted."""

    epoch: int = Field(description="From 0.")
    samples: int
    once: int
    twice: int
    never: int
    skipped: int = Field(description="Samples of slices that kill the workers that compute them.")
    workers: dict[str, int] = Field(description="Slices by worker.")
    slices: dict[str, list[str]] = Field(
        description='The workers of each slice, where that was asked for. "3-7": slices 3 to 7 have the same workers.'
    )


class Ledger(Model):
    """Which samples have counted how often."""

    version: int
    timeline: int
    begun: int = Field(default=0, description="Epochs of which something has counted.")
    total: LedgerEpoch | None = Field(
        default=None, description="All these epochs together; `epoch` is the newest of them."
    )
    epochs: list[LedgerEpoch] = Field(
        description="At most 500: those from `epoch` on, or the newest, and those with samples that did not count once."
    )


class Setting(Model):
    """One setting in force."""

    key: str
    value: str = Field(description='As text; secrets are "***".')
    origin: str = Field(description='"flag", "env NAME", "file PATH" or "default".')
    description: str


class Settings(Model):
    """The settings of the coordinator when it started."""

    settings: list[Setting]


class Target(Model):
    """A process that serves metrics about itself."""

    targets: list[str] = Field(description='One "host:port".')
    labels: dict[str, str] = Field(description="`process` is its name; Prometheus takes the others for itself.")


class Targets(RootModel[list[Target]]):
    """Servers and workers that serve metrics, in the form that `http_sd_configs` of Prometheus reads."""


class Failure(Model):
    """Every answer with a status of 400 or more."""

    error: str = Field(description="One sentence that says what is wrong, and what to do.")


class Done(Model):
    """The operation is done."""

    message: str


class Session(Model):
    """The rights of the caller."""

    reads: bool = Field(description="Whether it may read the state of the job.")
    commands: bool = Field(description="Whether it may give commands.")


class Login(Model):
    """A token in exchange for a session cookie."""

    token: str = Field(max_length=4096, description="A token of the job, or the key of a link to the page.")


class ChangeConsistency(Model):
    """As `paramserver set`."""

    mode: Literal["sync", "async"]
    staleness: Staleness | None = Field(default=None, description="Asynchronous mode only.")


class Scale(Model):
    """As `paramserver scale`: another number of workers, or of servers."""

    workers: int | None = Field(default=None, ge=1, le=4096)
    servers: int | None = Field(default=None, ge=1, le=4096)


class Named(Model):
    """As `paramserver drain` and `paramserver restart`."""

    name: str = Field(max_length=100, description="Such as worker-3.")


class Nothing(Model):
    """No fields: `{}`."""


class Stop(Model):
    """As `paramserver stop`."""

    reason: str = Field(default="", max_length=200)
