"""The settings, section by section: the purpose, the allowed values and the default of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import NoDecode

from paramserver.config.secrets import shown
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
    Share,
    Staleness,
    Threads,
    Token,
    can_listen,
    can_listen_with_port,
    empty_or,
    is_address,
    is_host,
    is_job_name,
    is_metric,
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

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, shown(name or "", value)


class Cluster(Section):
    """The processes of a job, their addresses and their patience."""

    coordinator: Annotated[
        str,
        only_if(lambda text: all(map(is_address, split_addresses(text)))),
        Must('"host:port", several of them with commas between, or empty'),
    ] = Field(
        default="",
        description="Address of the coordinator, and of the coordinators that stand by for it. Empty: `run` takes a "
        "free port; a script without `run` trains alone.",
    )
    listen: Annotated[str, empty_or(can_listen), Must('"host", "host:port" (port 0: any), or empty')] = Field(
        default="",
        description="Where this process listens. Empty: the coordinator at its own address, a server at this "
        "machine's address on the route to the coordinator, with a free port.",
    )
    advertise_host: Annotated[str, empty_or(is_host), Must("a host name or address, or empty")] = Field(
        default="", description="The name or address by which others reach this process. Empty: its listening address."
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
        description="How much of the model each server holds. balanced: all servers hold the same share. split: "
        "servers on a worker's host hold less than the others, which is best for the links if pushes and pulls "
        "overlap. auto: the placement that is faster by the cost model.",
    )
    link_mbps: Mbps = Field(
        default=1000.0,
        description="How fast a host's link is, in Mb/s. It decides the size of chunks if servers are on other hosts.",
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
        default=False, description="Whether this server is on the host of a worker; see cluster.placement."
    )
    workers: Processes = Field(
        default=2, description="Workers with which the job starts. A script that trains alone is one worker."
    )
    store: Annotated[
        str,
        only_if(STORE.match),
        Must('"auto", "memory", or an address that begins with "redis://", "rediss://" or "unix://"'),
    ] = Field(
        default="auto",
        description="Where the coordinator keeps its state. auto: in a private store, see docs/store.md.",
    )
    state_dir: PathText = Field(
        default="",
        description="Where `start coordinator` keeps a private store, in a directory of the job. Empty: paramserver in "
        "$XDG_STATE_HOME, or in ~/.local/state.",
    )
    store_password_file: PathText = Field(
        default="", description="A file with the password of the store, if cluster.store has no password. Empty: none."
    )
    job: Annotated[
        str,
        empty_or(is_job_name),
        Must('up to 64 letters, digits, ".", "_" and "-" (a letter or digit first), or empty'),
    ] = Field(default="", description="Name of the job. Empty: `run` makes one up.")
    join_timeout_s: Seconds = Field(
        default=180.0, description="How long a process waits for the other processes of the job to come."
    )
    lease_s: Seconds = Field(default=5.0, description="A process that says nothing for so long counts as lost.")
    stall_s: SecondsOrNone = Field(
        default=8.0,
        description="If a worker lives but hands in no slice for so long, its slices go to other workers. If four "
        "times the usual time of a slice is longer, that time counts. 0: never.",
    )
    wait_timeout_s: Seconds = Field(
        default=600.0, description="How long a worker waits for the others' slices of a step."
    )
    max_idle_s: Seconds = Field(
        default=600.0,
        description="How long a job waits before it fails, if it is stuck or lacks a server or all workers.",
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
        description="The directory in which processes of one host meet, to share memory. Containers need a directory "
        "in common, for example a volume. The directory holds only sockets and empty files.",
    )
    bulk_port: Port = Field(
        default=0,
        description="The port of a server for bulk connections, in addition to its port for gRPC. 0: a free port. "
        "Several servers of one machine take this port and the following ports.",
    )
    each_alone: bool = Field(
        default=False,
        description="Whether each process of srun, mpirun and the like may train a model of its own. Otherwise "
        "processes that know no coordinator are refused.",
    )
    max_restarts: Count = Field(
        default=3,
        description="How often in a row `run` and `start --restart` start a process again while the job gets no "
        "further. 0: never.",
    )
    preload: bool = Field(
        default=True,
        description="Whether `run` imports torch once, in a process from which it forks servers and workers. false: "
        "each process imports torch by itself. Scripts that set variables such as OMP_NUM_THREADS before "
        "the import need that.",
    )
    when_done: Literal["exit", "stay"] = Field(
        default="exit", description="What coordinator and servers do when the job is done."
    )


class Consistency(Section):
    """How strictly workers wait for each other."""

    mode: Literal["sync", "async"] = Field(
        default="sync",
        description="sync: a step is one update made of all its slices. async: every slice is an update.",
    )
    staleness: Staleness = Field(
        default=3, description="async only: by how many slices the fastest worker may be ahead of the slowest worker."
    )


class Training(Section):
    """Settings that change the resulting weights."""

    seed: Seed = Field(default=0, description="Seed of the data order, dropout and augmentation.")
    slices_per_step: Count = Field(
        default=0, description="sync only: slices in a step. 0: as many as workers at the start."
    )
    lr_scaling: Literal["auto", "none", "linear", "sqrt"] = Field(
        default="auto",
        description="Multiply the script's learning rates by slices_per_step / lr_base_slices (linear), or by its "
        "square root (sqrt). In asynchronous mode an update has one slice. auto: divide by slices_per_step while a job "
        "that began as sync is asynchronous.",
    )
    lr_base_slices: Count = Field(
        default=1,
        description="linear and sqrt only: the slices in a step that the script's learning rates are for. 0: as many "
        "as a step has.",
    )
    lr_warmup_steps: Count = Field(
        default=0,
        description="linear and sqrt only: in so many steps the factor rises evenly from 1 to its full value.",
    )
    chunk_bytes: ChunkBytes = Field(
        default=0, description="Size of a chunk. 0: chosen from the size of the model and the links."
    )
    sync_batchnorm: bool = Field(
        default=False,
        description="sync only: SyncBatchNorm takes its statistics over all slices of a step. Workers then wait for "
        "each other in each forward and backward pass. Give the job as many workers as slices in a step.",
    )
    same_script: Literal["all", "files", "none"] = Field(
        default="all",
        description="What has to be the same in all workers. all: the script, the modules beside it, and the "
        "arguments. files: arguments may differ, with a warning that names the first one. none: files may differ, too.",
    )
    nonfinite: Literal["skip", "reject", "fail"] = Field(
        default="skip",
        description="What happens if a gradient has NaN or infinity. skip: the step changes nothing. reject: the "
        "contribution is left out. fail: the run ends with an error.",
    )
    compare_samples: bool = Field(
        default=True,
        description="Workers compare some samples of each loader, and a worker with other samples is refused. false: "
        "samples are meant to differ between workers.",
    )
    poison: Literal["fail", "skip"] = Field(
        default="fail",
        description="What happens if three workers have died while they computed the same slice. fail: the job ends, "
        "and names the slice. skip: the samples of the slice are left out, and the job goes on.",
    )
    pull_precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="The precision to which weights are rounded on their way to workers. Servers, checkpoints and "
        "results keep fp32.",
    )
    push_compression: Literal["none", "bf16", "fp16", "int8", "topk"] = Field(
        default="none",
        description="How gradients are made smaller on their way to servers. int8 and topk keep what they leave out "
        "for the next step; see docs/compression.md.",
    )
    topk_ratio: Ratio = Field(
        default=0.01, description="topk only: the part of a gradient's numbers that is sent, the largest ones."
    )
    residual_flush_every: Count = Field(
        default=0,
        description="int8 and topk only: at versions that are multiples of this number, gradients leave nothing out. "
        "Checkpoints are taken only there. 0: the value of checkpoint.every, or 100 if that is 0.",
    )
    audit: Share = Field(
        default=0.0,
        description="sync only: the share of slices that a second worker computes, too, such as 0.01. Digests of both "
        "contributions are compared. A difference is a broken promise, which names workers, slice and tensor.",
    )
    threads_per_worker: Threads = Field(
        default=1, description="Threads with which a worker computes. Another number changes the bits of the result."
    )
    threads_per_server: ChosenThreads = Field(
        default=0,
        description="Threads with which a server applies updates. The bits of the result do not depend "
        "on it. 0: the server's share of the machine's processors, at most 8.",
    )
    device: Annotated[str, only_if(DEVICE.fullmatch), Must('"auto", "cpu", "mps", "cuda", or "cuda:N"')] = Field(
        default="auto", description="Where a worker computes. auto: a GPU if torch sees one."
    )


class Checkpoint(Section):
    """Saved versions of the weights, which outlive the death of every process."""

    dir: Annotated[str, Must('a directory, a URL, or "none"')] = Field(
        default="",
        description="Directory, or URL such as s3://bucket/path, that all servers and coordinators can reach. none: "
        "`run` keeps checkpoints as long as it runs; without `run`, a shard that is lost with all its "
        "copies ends the job. Empty: as none, but a coordinator that other machines can reach refuses to "
        "start.",
    )
    every: Count = Field(
        default=0, description="Steps (async: slices) from one checkpoint to the next. 0: checkpoint.every_s counts."
    )
    every_s: SecondsOrNone = Field(
        default=300.0,
        description="Seconds from one checkpoint to the next, if checkpoint.every is 0. 0: only the first and the last "
        "version. Without replicas, unless it is set: sooner while the job is young (after a tenth of the time so "
        "far); `run` without checkpoint.dir: 5, or more seldom if a checkpoint takes long.",
    )
    keep: Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=1_000_000), Must("an integer of 1 or more")] = (
        Field(default=3, description="How many checkpoints are kept. Older checkpoints are removed.")
    )
    best_metric: Annotated[str, only_if(is_metric), Must("a name of up to 100 printable characters, or empty")] = Field(
        default="",
        description="A name in ctx.log. The checkpoints with its best values are kept beside the newest ones, and the "
        "end of each epoch is a checkpoint. Empty: only the newest ones.",
    )
    best_mode: Literal["min", "max"] = Field(
        default="min", description="Whether low (min) or high (max) values of checkpoint.best_metric are good."
    )
    best_keep: OneOrMore = Field(
        default=1, description="How many checkpoints are kept for their values of checkpoint.best_metric."
    )
    resume: Annotated[str, Must("a directory, a checkpoint in one, or a URL")] = Field(
        default="",
        description="Continue from this checkpoint, or from the newest one in this directory. Empty: begin anew.",
    )

    @property
    def place(self) -> str:
        """The directory or URL of checkpoints; empty: there is none."""
        return "" if self.dir == NO_CHECKPOINTS else self.dir


class Run(Section):
    """The script, and the files that a run writes."""

    script: PathText = Field(default="", description="The training script, relative to the current directory.")
    args: Annotated[tuple[str, ...], NoDecode, BeforeValidator(json_list), Must("a list of strings")] = Field(
        default=(), description="Arguments of the script. In the environment: a JSON list."
    )
    module: bool = Field(default=False, description="Whether run.script is the name of a module, as for `python -m`.")
    summary: PathText = Field(default="", description="JSON file for the summary. Empty: none.")
    save: PathText = Field(default="", description="safetensors file for the weights. Empty: none.")
    ddp: bool = Field(
        default=False,
        description="Whether the script is written for DDP. Its workers are then the ranks of a process group; see "
        "docs/ddp.md.",
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
        default=False,
        description="Allow other machines without TLS. Everybody on the network can then read and change the traffic.",
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
        description="Where a server or a worker serves metrics about itself; under `run` only with port 0. The "
        "coordinator serves its metrics at the address of web.dashboard. off: nowhere.",
    )
    otlp: Annotated[str, empty_or(is_web_url), Must('"http://HOST:PORT", the same with "https", or empty')] = Field(
        default="",
        description="The OpenTelemetry collector to which this process sends metrics (OTLP over HTTP); to another "
        "machine only by https. It needs the packages of the extra `otel`. Empty: none.",
    )
