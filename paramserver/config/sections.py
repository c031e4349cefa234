"""The settings, section by section: the purpose, the allowed values and the default of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import NoDecode

from paramserver.config.secrets import hide_password
from paramserver.config.values import (
    DEVICE,
    OPTIMIZER,
    STORE,
    ChosenThreads,
    ChunkBytes,
    Count,
    Mbps,
    MbpsOrNone,
    ModelBytes,
    Must,
    OneOrMore,
    PathText,
    Port,
    Processes,
    ProcessesPerHost,
    Ratio,
    Replicas,
    Seconds,
    SecondsOrNone,
    Seed,
    Staleness,
    Threads,
    Token,
    can_listen,
    can_listen_with_port,
    empty_or,
    is_address,
    is_host,
    is_job_name,
    is_web_url,
    json_list,
    only_if,
    refuse_bool,
    split_addresses,
)

# The value of checkpoint.dir with which a job expressly does without checkpoints.
NO_CHECKPOINTS = "none"


# The names in run.track.
TRACKERS = frozenset(("tensorboard", "wandb", "mlflow", "trackio"))


class Section(BaseModel):
    """One table of the file. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Cluster(Section):
    """The processes of a job, their addresses and their patience."""

    coordinator: Annotated[
        str,
        only_if(lambda text: all(map(is_address, split_addresses(text)))),
        Must('"host:port", several of them with commas between, or empty'),
    ] = Field(
        default="",
        description="Address of the coordinator, and of those that stand by for it. Empty: `run` takes a free port, "
        "a script trains alone.",
    )
    listen: Annotated[str, empty_or(can_listen), Must('"host", "host:port" (port 0: any), or empty')] = Field(
        default="",
        description="Where this process listens. Empty: the coordinator at its own address, a server at this "
        "machine's address on the route to the coordinator, with a free port.",
    )
    advertise_host: Annotated[str, empty_or(is_host), Must("a host name or address, or empty")] = Field(
        default="", description="Under which name others reach this process. Empty: the address that it listens on."
    )
    servers: Processes = Field(default=1, description="Servers that share the model.")
    servers_per_host: ProcessesPerHost = Field(
        default=1,
        description="Server processes that `start server` starts on its host; each counts as one of cluster.servers.",
    )
    optimizers: Annotated[
        str,
        empty_or(lambda text: all(map(OPTIMIZER.fullmatch, split_addresses(text)))),
        Must('"module:Class", several of them with commas between, or empty'),
    ] = Field(
        default="",
        description="Optimizers beside torch's that a server may import and run. Only the setting of the server itself "
        "counts; see docs/training.md.",
    )
    placement: Literal["auto", "balanced", "split"] = Field(
        default="auto",
        description="How much of the model each server takes. balanced: all as much. split: servers beside workers "
        "less than the others, as is best for the links. auto: whichever the cost model says is faster.",
    )
    link_mbps: Mbps = Field(
        default=1000.0,
        description="How fast a host's link is, in Mb/s. Chunks are chosen by it where servers are on other hosts.",
    )
    replicas: Replicas = Field(
        default="auto",
        description="How many further servers hold a copy of each part of the model. auto: 1 if there are two or more "
        "servers and `run` did not start them, else 0.",
    )
    repair_mbps: MbpsOrNone = Field(
        default=0.0,
        description="The rate at which a server gets a copy of a part of the model during training, in Mb/s. 0: half "
        "of cluster.link_mbps.",
    )
    max_model_bytes: ModelBytes = Field(
        default=64 << 30,
        description="The largest model, in bytes of weights on all servers together; a larger one is refused at once.",
    )
    beside_worker: bool = Field(
        default=False, description="This server is on the host of a worker; see cluster.placement."
    )
    workers: Processes = Field(
        default=2, description="Workers the job starts with. A script without a cluster is one worker."
    )
    store: Annotated[
        str,
        only_if(STORE.match),
        Must('"auto", "memory", or an address that begins with "redis://", "rediss://" or "unix://"'),
    ] = Field(default="auto", description="Where the coordinator keeps its state. auto: a private server of its own.")
    state_dir: PathText = Field(
        default="",
        description="Where `start coordinator` keeps a private store, in a directory of the job. Empty: paramserver in "
        "$XDG_STATE_HOME, or in ~/.local/state.",
    )
    store_password_file: PathText = Field(
        default="", description="File with the store's password, in place of one in cluster.store. Empty: none."
    )
    job: Annotated[
        str,
        empty_or(is_job_name),
        Must('up to 64 letters, digits, ".", "_" and "-" (a letter or digit first), or empty'),
    ] = Field(default="", description="Name of the job. Empty: `run` makes one up.")
    join_timeout_s: Seconds = Field(default=180.0, description="How long a process waits for the others to arrive.")
    lease_s: Seconds = Field(default=5.0, description="After this silence a member is taken for lost.")
    stall_s: SecondsOrNone = Field(
        default=8.0,
        description="After this time without a slice, or four times what slices usually take if that is longer, the "
        "slices of a worker that lives go to others. 0: never.",
    )
    wait_timeout_s: Seconds = Field(
        default=600.0, description="How long a worker waits for the others' slices of a step."
    )
    max_idle_s: Seconds = Field(
        default=600.0, description="How long a job waits when a server or every worker is gone, or when it is stuck."
    )
    transport: Literal["auto", "shm", "bulk", "grpc"] = Field(
        default="auto",
        description="How weights and gradients travel. auto: in shared memory between a worker and a server on one "
        "host, else as bulk; a worker near some of the servers only sends large models to all as bulk. shm: in shared "
        "memory, or not at all. bulk: over sockets beside gRPC, or over gRPC where their port cannot be reached. grpc: "
        "over gRPC alone, for proxies and meshes.",
    )
    host_tier: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: where several workers run on one host and the servers on others, one of the workers pulls "
        "the weights for all of them, adds up their gradients and pushes the sum, in synchronous mode, if the model "
        "has 1 MB or more and cluster.transport is auto or bulk. off: each worker pulls and pushes by itself.",
    )
    meeting_dir: Annotated[
        str,
        only_if(lambda path: path.startswith("/") and len(path.encode()) <= 62),
        Must("an absolute path of up to 62 bytes"),
    ] = Field(
        default="/dev/shm",
        description="The directory in which processes of one host meet, to share memory. Containers need one in "
        "common for it, such as a volume. Only sockets and empty files lie there.",
    )
    bulk_port: Port = Field(
        default=0,
        description="The port of a server for bulk connections, beside the one for gRPC. 0: any that is free. Several "
        "servers of one machine take this port and the next ones.",
    )
    max_restarts: Count = Field(
        default=3,
        description="How often in a row `run` and `start --restart` start a process again while the job gets no "
        "further. 0: never.",
    )
    preload: bool = Field(
        default=True,
        description="Whether `run` imports torch once, in a process of which servers and workers are forked. false: "
        "each process imports torch by itself, for scripts that set variables like OMP_NUM_THREADS before the import.",
    )
    when_done: Literal["exit", "stay"] = Field(
        default="exit", description="What coordinator and servers do when the job is done."
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, hide_password(value) if name == "store" else value


class Consistency(Section):
    """How strictly workers wait for each other."""

    mode: Literal["sync", "async"] = Field(
        default="sync",
        description="sync: a step is one update made of all its slices. async: every slice is an update.",
    )
    staleness: Staleness = Field(
        default=3, description="async only: how many slices the fastest worker may be ahead of the slowest."
    )


class Training(Section):
    """Settings that decide the weights that come out."""

    seed: Seed = Field(default=0, description="Seed of the data order, dropout and augmentation.")
    slices_per_step: Count = Field(
        default=0, description="sync only: slices in a step. 0: as many as workers at the start."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="Multiply the script's learning rates by slices_per_step / lr_base_slices (linear), or by its "
        "square root (sqrt). In asynchronous mode an update has one slice.",
    )
    lr_base_slices: OneOrMore = Field(
        default=1, description="lr_scaling only: the slices in a step that the script's learning rates are for."
    )
    lr_warmup_steps: Count = Field(
        default=0, description="lr_scaling only: in so many steps the factor rises evenly from 1 to its whole."
    )
    chunk_bytes: ChunkBytes = Field(
        default=0, description="Size of a chunk. 0: chosen from the size of the model and the links."
    )
    sync_batchnorm: bool = Field(
        default=False,
        description="sync only: SyncBatchNorm takes its statistics over all slices of a step. Workers then wait for "
        "each other in each forward and backward pass. Give the job as many workers as slices in a step.",
    )
    nonfinite: Literal["skip", "reject", "fail"] = Field(
        default="skip",
        description="A NaN or infinite gradient: skip the step, reject the contribution, or fail the run.",
    )
    poison: Literal["fail", "skip"] = Field(
        default="fail",
        description="A slice that kills three workers that compute it: end the job and name it, or count it without "
        "its samples.",
    )
    pull_precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="What weights are rounded to on their way to workers. Servers, checkpoints, results keep fp32.",
    )
    push_compression: Literal["none", "bf16", "fp16", "int8", "topk"] = Field(
        default="none",
        description="How gradients are made smaller on their way to servers. int8 and topk keep what they leave out "
        "for the next step; see docs/compression.md.",
    )
    topk_ratio: Ratio = Field(default=0.01, description="topk only: which part of the numbers of a gradient is sent.")
    residual_flush_every: Count = Field(
        default=0,
        description="int8 and topk only: at versions that are multiples of this nothing is left out, which is where "
        "checkpoints can be taken. 0: checkpoint.every, or 100 without.",
    )
    threads_per_worker: Threads = Field(
        default=1, description="Threads a worker computes with; other numbers change bits."
    )
    threads_per_server: ChosenThreads = Field(
        default=0,
        description="Threads a server applies updates with; bits do not depend on it. 0: its share of the machine's "
        "processors, 8 at most.",
    )
    device: Annotated[str, only_if(DEVICE.fullmatch), Must('"auto", "cpu", "mps", "cuda", or "cuda:N"')] = Field(
        default="auto", description="Where a worker computes. auto: a GPU if torch sees one."
    )


class Checkpoint(Section):
    """Saved versions of the weights, which outlive the death of every process."""

    dir: Annotated[str, Must('a directory, a URL, or "none"')] = Field(
        default="",
        description="Directory, or URL such as s3://bucket/path, that all servers and coordinators reach. none: `run` "
        "keeps checkpoints as long as it runs; elsewhere a shard that is lost with all its copies ends the job. "
        "Empty: the same, but a coordinator that other machines can reach does not start.",
    )
    every: Count = Field(
        default=0, description="Steps (async: slices) from one checkpoint to the next. 0: checkpoint.every_s counts."
    )
    every_s: SecondsOrNone = Field(
        default=300.0,
        description="Seconds from one checkpoint to the next, if checkpoint.every is 0. 0: only the first and the last "
        "version. `run` without checkpoint.dir: 0 unless it is set.",
    )
    keep: Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=1_000_000), Must("an integer of 1 or more")] = (
        Field(default=3, description="How many checkpoints are kept; older ones are removed.")
    )
    resume: Annotated[str, Must("a directory, a checkpoint in one, or a URL")] = Field(
        default="", description="Go on from this checkpoint, or from the newest in this directory. Empty: begin anew."
    )

    @property
    def place(self) -> str:
        """The directory or URL of checkpoints; empty: there is none."""
        return "" if self.dir == NO_CHECKPOINTS else self.dir


class Run(Section):
    """The script, and the files that a run writes."""

    script: PathText = Field(default="", description="Training script, relative to where you are.")
    args: Annotated[tuple[str, ...], NoDecode, BeforeValidator(json_list), Must("a list of strings")] = Field(
        default=(), description="Arguments of the script. In the environment: a JSON list."
    )
    summary: PathText = Field(default="", description="JSON file for the summary. Empty: none.")
    save: PathText = Field(default="", description="safetensors file for the weights. Empty: none.")
    ddp: bool = Field(
        default=False,
        description="The script is one for DDP: its workers are the ranks of a process group, see docs/ddp.md.",
    )
    records: PathText = Field(
        default="", description="File of JSON lines for the values of ctx.log, one line per step. Empty: none."
    )
    report: PathText = Field(
        default="", description="File for the report of the run: .html, .md or .json. Empty: none."
    )
    track: Annotated[
        str,
        empty_or(lambda text: set(text.split(",")) <= TRACKERS),
        Must(f"names with commas between, of: {', '.join(sorted(TRACKERS))}"),
    ] = Field(default="", description="Trackers that get the values of ctx.log, with commas between. Empty: none.")

    @property
    def trackers(self) -> list[str]:
        """The names in ``track``, each once."""
        return list(dict.fromkeys(filter(None, self.track.split(","))))


class Log(Section):
    """The messages of the processes while they work."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least important messages to show."
    )
    format: Literal["auto", "text", "json"] = Field(
        default="auto",
        description="text: lines for people. json: one JSON object per line, with role, name and step. auto: json in a "
        "container where standard error is no terminal; `run` shows text.",
    )
    interval_s: Seconds = Field(
        default=5.0, description="Seconds between two lines of progress where there is no terminal."
    )


class Security(Section):
    """Certificates and tokens of members and operators."""

    certs: PathText = Field(default="", description="Directory made by `paramserver certs init`. Empty: no TLS.")
    token_file: PathText = Field(
        default="", description="File with the token of all members. Empty: join.token in security.certs, if there."
    )
    admin_token_file: PathText = Field(
        default="", description="File with the operators' token. Empty: admin.token in security.certs, if there."
    )
    token: Token = Field(default=SecretStr(""), description="The token of all members, from the environment only.")
    admin_token: Token = Field(default=SecretStr(""), description="The operators' token, from the environment only.")
    insecure: bool = Field(
        default=False, description="Allow other machines without TLS: everybody on the network can read and interfere."
    )


class Web(Section):
    """The dashboard, its API, and metrics, over HTTP."""

    dashboard: Annotated[
        str,
        only_if(lambda text: text in ("auto", "off") or can_listen_with_port(text)),
        Must('"auto", "off", or "host:port" (port 0: any)'),
    ] = Field(
        default="auto",
        description="Where the coordinator serves the dashboard and its API. auto: a free port of the loopback "
        "interface, if the packages of the extra `dashboard` are installed. off: nowhere.",
    )
    metrics: Annotated[
        str,
        only_if(lambda text: text == "off" or can_listen_with_port(text)),
        Must('"off", or "host:port" (port 0: any)'),
    ] = Field(
        default="off",
        description="Where a server or a worker serves metrics about itself; under `run`, port 0 only. Those of the "
        "coordinator are at the address of web.dashboard. off: nowhere.",
    )
    otlp: Annotated[str, empty_or(is_web_url), Must('"http://HOST:PORT", the same with "https", or empty')] = Field(
        default="",
        description="The OpenTelemetry collector to which this process sends metrics (OTLP over HTTP); on another "
        "machine by https. Takes the packages of the extra `otel`. Empty: none.",
    )
