from paramserver.v1 import shard_pb2 as _shard_pb2
from paramserver.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("job", "role", "protocol", "versions", "pid", "address", "index", "mode", "staleness", "slices_per_step", "seed", "incarnation", "holds", "timeline", "replaces", "restart_command", "metrics_url", "host", "beside_worker", "term", "beginning", "key")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SLICES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    RESTART_COMMAND_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BESIDE_WORKER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BEGINNING_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    job: str
    role: _types_pb2.Role
    protocol: int
    versions: _containers.ScalarMap[str, str]
    pid: int
    address: str
    index: int
    mode: _types_pb2.Mode
    staleness: int
    slices_per_step: int
    seed: int
    incarnation: int
    holds: str
    timeline: int
    replaces: _containers.RepeatedScalarFieldContainer[int]
    restart_command: str
    metrics_url: str
    host: str
    beside_worker: bool
    term: int
    beginning: int
    key: bytes
    def __init__(self, job: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., protocol: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., index: _Optional[int] = ..., mode: _Optional[_Union[_types_pb2.Mode, str]] = ..., staleness: _Optional[int] = ..., slices_per_step: _Optional[int] = ..., seed: _Optional[int] = ..., incarnation: _Optional[int] = ..., holds: _Optional[str] = ..., timeline: _Optional[int] = ..., replaces: _Optional[_Iterable[int]] = ..., restart_command: _Optional[str] = ..., metrics_url: _Optional[str] = ..., host: _Optional[str] = ..., beside_worker: bool = ..., term: _Optional[int] = ..., beginning: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("member", "name", "rank", "job", "lease_s", "view", "expected_workers")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    member: int
    name: str
    rank: int
    job: str
    lease_s: float
    view: _types_pb2.View
    expected_workers: int
    def __init__(self, member: _Optional[int] = ..., name: _Optional[str] = ..., rank: _Optional[int] = ..., job: _Optional[str] = ..., lease_s: _Optional[float] = ..., view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., expected_workers: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("member", "worker", "shards", "leaving", "finished", "failure", "address", "key", "ended", "not_main")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    NOT_MAIN_FIELD_NUMBER: _ClassVar[int]
    member: int
    worker: WorkerReport
    shards: _containers.RepeatedCompositeFieldContainer[_shard_pb2.StatsResponse]
    leaving: bool
    finished: bool
    failure: str
    address: str
    key: bytes
    ended: bool
    not_main: bool
    def __init__(self, member: _Optional[int] = ..., worker: _Optional[_Union[WorkerReport, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[_shard_pb2.StatsResponse, _Mapping]]] = ..., leaving: bool = ..., finished: bool = ..., failure: _Optional[str] = ..., address: _Optional[str] = ..., key: _Optional[bytes] = ..., ended: bool = ..., not_main: bool = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("view", "trace")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    view: _types_pb2.View
    trace: TraceOrder
    def __init__(self, view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., trace: _Optional[_Union[TraceOrder, _Mapping]] = ...) -> None: ...

class TraceOrder(_message.Message):
    __slots__ = ("number", "steps", "profiler", "over")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROFILER_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    number: int
    steps: int
    profiler: bool
    over: bool
    def __init__(self, number: _Optional[int] = ..., steps: _Optional[int] = ..., profiler: bool = ..., over: bool = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("computing", "version", "clock", "epoch", "samples", "slices", "state", "waiting_for", "metrics", "transport", "epochs_planned", "at_work", "slice_s", "tally", "first_metric", "logged", "logged_from", "logging_timeline", "logging_step", "steps", "phases", "phase", "phase_s", "since", "untold", "transport_reason", "host_tier", "audited")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    AT_WORK_FIELD_NUMBER: _ClassVar[int]
    SLICE_S_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    FIRST_METRIC_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FROM_FIELD_NUMBER: _ClassVar[int]
    LOGGING_TIMELINE_FIELD_NUMBER: _ClassVar[int]
    LOGGING_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTOLD_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_REASON_FIELD_NUMBER: _ClassVar[int]
    HOST_TIER_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    computing: _types_pb2.SliceRef
    version: int
    clock: int
    epoch: int
    samples: int
    slices: int
    state: str
    waiting_for: str
    metrics: _containers.ScalarMap[str, float]
    transport: str
    epochs_planned: int
    at_work: bool
    slice_s: float
    tally: Tally
    first_metric: str
    logged: _containers.RepeatedCompositeFieldContainer[Logged]
    logged_from: int
    logging_timeline: int
    logging_step: int
    steps: _containers.RepeatedCompositeFieldContainer[WorkerStep]
    phases: Phases
    phase: str
    phase_s: float
    since: Phases
    untold: bool
    transport_reason: str
    host_tier: str
    audited: _containers.RepeatedCompositeFieldContainer[AuditedSlice]
    def __init__(self, computing: _Optional[_Union[_types_pb2.SliceRef, _Mapping]] = ..., version: _Optional[int] = ..., clock: _Optional[int] = ..., epoch: _Optional[int] = ..., samples: _Optional[int] = ..., slices: _Optional[int] = ..., state: _Optional[str] = ..., waiting_for: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., transport: _Optional[str] = ..., epochs_planned: _Optional[int] = ..., at_work: bool = ..., slice_s: _Optional[float] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., first_metric: _Optional[str] = ..., logged: _Optional[_Iterable[_Union[Logged, _Mapping]]] = ..., logged_from: _Optional[int] = ..., logging_timeline: _Optional[int] = ..., logging_step: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[WorkerStep, _Mapping]]] = ..., phases: _Optional[_Union[Phases, _Mapping]] = ..., phase: _Optional[str] = ..., phase_s: _Optional[float] = ..., since: _Optional[_Union[Phases, _Mapping]] = ..., untold: bool = ..., transport_reason: _Optional[str] = ..., host_tier: _Optional[str] = ..., audited: _Optional[_Iterable[_Union[AuditedSlice, _Mapping]]] = ...) -> None: ...

class AuditedSlice(_message.Message):
    __slots__ = ("timeline", "step", "slice", "digests")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    slice: int
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., slice: _Optional[int] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("compared", "differ")
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    DIFFER_FIELD_NUMBER: _ClassVar[int]
    compared: int
    differ: int
    def __init__(self, compared: _Optional[int] = ..., differ: _Optional[int] = ...) -> None: ...

class Phases(_message.Message):
    __slots__ = ("data_s", "compute_s", "send_s", "wait_s", "receive_s", "other_s", "gc_s", "starved_s", "paused_s")
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    SEND_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_S_FIELD_NUMBER: _ClassVar[int]
    OTHER_S_FIELD_NUMBER: _ClassVar[int]
    GC_S_FIELD_NUMBER: _ClassVar[int]
    STARVED_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    data_s: float
    compute_s: float
    send_s: float
    wait_s: float
    receive_s: float
    other_s: float
    gc_s: float
    starved_s: float
    paused_s: float
    def __init__(self, data_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., send_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., receive_s: _Optional[float] = ..., other_s: _Optional[float] = ..., gc_s: _Optional[float] = ..., starved_s: _Optional[float] = ..., paused_s: _Optional[float] = ...) -> None: ...

class WorkerStep(_message.Message):
    __slots__ = ("step", "asynchronous", "phases", "first")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ASYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    step: int
    asynchronous: bool
    phases: Phases
    first: bool
    def __init__(self, step: _Optional[int] = ..., asynchronous: bool = ..., phases: _Optional[_Union[Phases, _Mapping]] = ..., first: bool = ...) -> None: ...

class Logged(_message.Message):
    __slots__ = ("step", "timeline", "slice", "samples", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    step: int
    timeline: int
    slice: _types_pb2.SliceRef
    samples: int
    values: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., timeline: _Optional[int] = ..., slice: _Optional[_Union[_types_pb2.SliceRef, _Mapping]] = ..., samples: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Tally(_message.Message):
    __slots__ = ("timeline", "handed_in", "counted", "late", "duplicate", "name", "lost", "incarnation", "version", "unsent")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    HANDED_IN_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNSENT_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    handed_in: int
    counted: int
    late: int
    duplicate: int
    name: str
    lost: bool
    incarnation: int
    version: int
    unsent: int
    def __init__(self, timeline: _Optional[int] = ..., handed_in: _Optional[int] = ..., counted: _Optional[int] = ..., late: _Optional[int] = ..., duplicate: _Optional[int] = ..., name: _Optional[str] = ..., lost: bool = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., unsent: _Optional[int] = ...) -> None: ...

class RegisterModelRequest(_message.Message):
    __slots__ = ("member", "model", "state_digest", "script")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    member: int
    model: _types_pb2.ModelSpec
    state_digest: str
    script: bool
    def __init__(self, member: _Optional[int] = ..., model: _Optional[_Union[_types_pb2.ModelSpec, _Mapping]] = ..., state_digest: _Optional[str] = ..., script: bool = ...) -> None: ...

class RegisterModelResponse(_message.Message):
    __slots__ = ("model", "shards", "layout_digest")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelSpec
    shards: int
    layout_digest: str
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelSpec, _Mapping]] = ..., shards: _Optional[int] = ..., layout_digest: _Optional[str] = ...) -> None: ...

class RegisterDataRequest(_message.Message):
    __slots__ = ("member", "data")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    member: int
    data: _types_pb2.DataSpec
    def __init__(self, member: _Optional[int] = ..., data: _Optional[_Union[_types_pb2.DataSpec, _Mapping]] = ...) -> None: ...

class RegisterDataResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InitializeDoneRequest(_message.Message):
    __slots__ = ("member", "grant")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    member: int
    grant: int
    def __init__(self, member: _Optional[int] = ..., grant: _Optional[int] = ...) -> None: ...

class InitializeDoneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("member", "max_epoch", "want", "done", "last_epoch", "wait_s", "revision", "holding", "timeline")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    member: int
    max_epoch: int
    want: int
    done: _containers.RepeatedCompositeFieldContainer[_shard_pb2.AsyncName]
    last_epoch: bool
    wait_s: float
    revision: int
    holding: _containers.RepeatedCompositeFieldContainer[_shard_pb2.AsyncName]
    timeline: int
    def __init__(self, member: _Optional[int] = ..., max_epoch: _Optional[int] = ..., want: _Optional[int] = ..., done: _Optional[_Iterable[_Union[_shard_pb2.AsyncName, _Mapping]]] = ..., last_epoch: bool = ..., wait_s: _Optional[float] = ..., revision: _Optional[int] = ..., holding: _Optional[_Iterable[_Union[_shard_pb2.AsyncName, _Mapping]]] = ..., timeline: _Optional[int] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("slices", "finished", "paused", "waiting_for", "open_epoch")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    OPEN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedCompositeFieldContainer[_shard_pb2.AsyncName]
    finished: bool
    paused: bool
    waiting_for: str
    open_epoch: int
    def __init__(self, slices: _Optional[_Iterable[_Union[_shard_pb2.AsyncName, _Mapping]]] = ..., finished: bool = ..., paused: bool = ..., waiting_for: _Optional[str] = ..., open_epoch: _Optional[int] = ...) -> None: ...

class ChangeConsistencyRequest(_message.Message):
    __slots__ = ("mode", "staleness", "wait_s")
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    mode: _types_pb2.Mode
    staleness: int
    wait_s: float
    def __init__(self, mode: _Optional[_Union[_types_pb2.Mode, str]] = ..., staleness: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ChangeConsistencyResponse(_message.Message):
    __slots__ = ("consistency",)
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    consistency: _types_pb2.Consistency
    def __init__(self, consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("model", "events", "report", "since_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    model: bool
    events: bool
    report: bool
    since_s: float
    def __init__(self, model: bool = ..., events: bool = ..., report: bool = ..., since_s: _Optional[float] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("curves", "moments", "settings", "versions", "host")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CURVES_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    curves: _containers.RepeatedCompositeFieldContainer[Curve]
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    settings: _containers.RepeatedCompositeFieldContainer[SettingInForce]
    versions: _containers.ScalarMap[str, str]
    host: str
    def __init__(self, curves: _Optional[_Iterable[_Union[Curve, _Mapping]]] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., settings: _Optional[_Iterable[_Union[SettingInForce, _Mapping]]] = ..., versions: _Optional[_Mapping[str, str]] = ..., host: _Optional[str] = ...) -> None: ...

class Curve(_message.Message):
    __slots__ = ("name", "points")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    points: _containers.RepeatedCompositeFieldContainer[Point]
    def __init__(self, name: _Optional[str] = ..., points: _Optional[_Iterable[_Union[Point, _Mapping]]] = ...) -> None: ...

class Point(_message.Message):
    __slots__ = ("step", "at_s", "timeline", "value")
    STEP_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    step: int
    at_s: float
    timeline: int
    value: float
    def __init__(self, step: _Optional[int] = ..., at_s: _Optional[float] = ..., timeline: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("at_s", "version", "samples_per_s")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    version: int
    samples_per_s: float
    def __init__(self, at_s: _Optional[float] = ..., version: _Optional[int] = ..., samples_per_s: _Optional[float] = ...) -> None: ...

class SettingInForce(_message.Message):
    __slots__ = ("key", "value", "origin")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    origin: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., origin: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("at_s", "kind", "subject", "text", "version")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    kind: str
    subject: str
    text: str
    version: int
    def __init__(self, at_s: _Optional[float] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., text: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class ProcessStatus(_message.Message):
    __slots__ = ("role", "name", "pid", "address", "state", "version", "clock", "epoch", "samples", "slices", "waiting_for", "metrics", "transport", "member", "server", "epochs_planned", "reason", "gone", "restart_command", "phases", "phase", "phase_s", "metrics_url", "first_metric", "transport_reason", "host_tier", "samples_per_s", "bytes_per_s")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    RESTART_COMMAND_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    FIRST_METRIC_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_REASON_FIELD_NUMBER: _ClassVar[int]
    HOST_TIER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    pid: int
    address: str
    state: str
    version: int
    clock: int
    epoch: int
    samples: int
    slices: int
    waiting_for: str
    metrics: _containers.ScalarMap[str, float]
    transport: str
    member: int
    server: _shard_pb2.StatsResponse
    epochs_planned: int
    reason: str
    gone: bool
    restart_command: str
    phases: Phases
    phase: str
    phase_s: float
    metrics_url: str
    first_metric: str
    transport_reason: str
    host_tier: str
    samples_per_s: float
    bytes_per_s: float
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[int] = ..., clock: _Optional[int] = ..., epoch: _Optional[int] = ..., samples: _Optional[int] = ..., slices: _Optional[int] = ..., waiting_for: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., transport: _Optional[str] = ..., member: _Optional[int] = ..., server: _Optional[_Union[_shard_pb2.StatsResponse, _Mapping]] = ..., epochs_planned: _Optional[int] = ..., reason: _Optional[str] = ..., gone: bool = ..., restart_command: _Optional[str] = ..., phases: _Optional[_Union[Phases, _Mapping]] = ..., phase: _Optional[str] = ..., phase_s: _Optional[float] = ..., metrics_url: _Optional[str] = ..., first_metric: _Optional[str] = ..., transport_reason: _Optional[str] = ..., host_tier: _Optional[str] = ..., samples_per_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("job", "view", "processes", "model", "data", "steps_per_epoch", "lost", "expected_workers", "expected_servers", "store", "uptime_s", "store_operations", "training_s", "term", "summary", "security", "finished", "checkpoint", "rollbacks", "steps_redone", "wanted_workers", "troubles", "broken_promises", "state", "reason", "losses", "idle", "poisoned", "closing", "not_counted", "samples_before", "shards", "holders", "takeovers", "repairs", "wanted_servers", "events", "samples_per_s", "dashboard", "blame", "history", "effective_batch", "lr_factor", "lr_factor_whole", "said", "audit")
    class TroublesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class BrokenPromisesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NotCountedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STORE_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_S_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SECURITY_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_REDONE_FIELD_NUMBER: _ClassVar[int]
    WANTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    BROKEN_PROMISES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    POISONED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    NOT_COUNTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TAKEOVERS_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    WANTED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DASHBOARD_FIELD_NUMBER: _ClassVar[int]
    BLAME_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_BATCH_FIELD_NUMBER: _ClassVar[int]
    LR_FACTOR_FIELD_NUMBER: _ClassVar[int]
    LR_FACTOR_WHOLE_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    job: str
    view: _types_pb2.View
    processes: _containers.RepeatedCompositeFieldContainer[ProcessStatus]
    model: _types_pb2.ModelSpec
    data: _types_pb2.DataSpec
    steps_per_epoch: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    expected_workers: int
    expected_servers: int
    store: str
    uptime_s: float
    store_operations: int
    training_s: float
    term: int
    summary: str
    security: str
    finished: bool
    checkpoint: str
    rollbacks: int
    steps_redone: int
    wanted_workers: int
    troubles: _containers.ScalarMap[str, str]
    broken_promises: _containers.ScalarMap[str, str]
    state: str
    reason: str
    losses: int
    idle: _containers.RepeatedScalarFieldContainer[str]
    poisoned: _containers.RepeatedScalarFieldContainer[str]
    closing: bool
    not_counted: _containers.ScalarMap[str, int]
    samples_before: int
    shards: int
    holders: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    takeovers: int
    repairs: int
    wanted_servers: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    samples_per_s: float
    dashboard: str
    blame: Blame
    history: History
    effective_batch: int
    lr_factor: float
    lr_factor_whole: float
    said: _containers.RepeatedScalarFieldContainer[str]
    audit: Audit
    def __init__(self, job: _Optional[str] = ..., view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., processes: _Optional[_Iterable[_Union[ProcessStatus, _Mapping]]] = ..., model: _Optional[_Union[_types_pb2.ModelSpec, _Mapping]] = ..., data: _Optional[_Union[_types_pb2.DataSpec, _Mapping]] = ..., steps_per_epoch: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ..., expected_workers: _Optional[int] = ..., expected_servers: _Optional[int] = ..., store: _Optional[str] = ..., uptime_s: _Optional[float] = ..., store_operations: _Optional[int] = ..., training_s: _Optional[float] = ..., term: _Optional[int] = ..., summary: _Optional[str] = ..., security: _Optional[str] = ..., finished: bool = ..., checkpoint: _Optional[str] = ..., rollbacks: _Optional[int] = ..., steps_redone: _Optional[int] = ..., wanted_workers: _Optional[int] = ..., troubles: _Optional[_Mapping[str, str]] = ..., broken_promises: _Optional[_Mapping[str, str]] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., losses: _Optional[int] = ..., idle: _Optional[_Iterable[str]] = ..., poisoned: _Optional[_Iterable[str]] = ..., closing: bool = ..., not_counted: _Optional[_Mapping[str, int]] = ..., samples_before: _Optional[int] = ..., shards: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., takeovers: _Optional[int] = ..., repairs: _Optional[int] = ..., wanted_servers: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., samples_per_s: _Optional[float] = ..., dashboard: _Optional[str] = ..., blame: _Optional[_Union[Blame, _Mapping]] = ..., history: _Optional[_Union[History, _Mapping]] = ..., effective_batch: _Optional[int] = ..., lr_factor: _Optional[float] = ..., lr_factor_whole: _Optional[float] = ..., said: _Optional[_Iterable[str]] = ..., audit: _Optional[_Union[Audit, _Mapping]] = ...) -> None: ...

class Blame(_message.Message):
    __slots__ = ("sentence", "chronic", "worst", "held", "staleness", "steps", "waited_s", "usual_s")
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    CHRONIC_FIELD_NUMBER: _ClassVar[int]
    WORST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    USUAL_S_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    chronic: str
    worst: _containers.RepeatedCompositeFieldContainer[BlamedStep]
    held: _containers.RepeatedCompositeFieldContainer[HeldWorker]
    staleness: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    waited_s: float
    usual_s: float
    def __init__(self, sentence: _Optional[str] = ..., chronic: _Optional[str] = ..., worst: _Optional[_Iterable[_Union[BlamedStep, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[HeldWorker, _Mapping]]] = ..., staleness: _Optional[_Iterable[int]] = ..., steps: _Optional[int] = ..., waited_s: _Optional[float] = ..., usual_s: _Optional[float] = ...) -> None: ...

class BlamedStep(_message.Message):
    __slots__ = ("step", "asynchronous", "waited_s", "member", "slices", "cause", "cause_s", "sentence", "at_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ASYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_S_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    asynchronous: bool
    waited_s: float
    member: str
    slices: str
    cause: str
    cause_s: float
    sentence: str
    at_s: float
    def __init__(self, step: _Optional[int] = ..., asynchronous: bool = ..., waited_s: _Optional[float] = ..., member: _Optional[str] = ..., slices: _Optional[str] = ..., cause: _Optional[str] = ..., cause_s: _Optional[float] = ..., sentence: _Optional[str] = ..., at_s: _Optional[float] = ...) -> None: ...

class HeldWorker(_message.Message):
    __slots__ = ("worker", "by", "times", "seconds")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    by: str
    times: int
    seconds: float
    def __init__(self, worker: _Optional[str] = ..., by: _Optional[str] = ..., times: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("shard", "primary", "backups", "state")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    BACKUPS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    primary: str
    backups: _containers.RepeatedCompositeFieldContainer[CopyOnServer]
    state: str
    def __init__(self, shard: _Optional[int] = ..., primary: _Optional[str] = ..., backups: _Optional[_Iterable[_Union[CopyOnServer, _Mapping]]] = ..., state: _Optional[str] = ...) -> None: ...

class CopyOnServer(_message.Message):
    __slots__ = ("server", "whole", "share")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    server: str
    whole: bool
    share: float
    def __init__(self, server: _Optional[str] = ..., whole: bool = ..., share: _Optional[float] = ...) -> None: ...

class SettingsRequest(_message.Message):
    __slots__ = ("newcomer",)
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    newcomer: int
    def __init__(self, newcomer: _Optional[int] = ...) -> None: ...

class SettingsResponse(_message.Message):
    __slots__ = ("job", "protocol", "versions", "settings")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    job: str
    protocol: int
    versions: _containers.ScalarMap[str, str]
    settings: _containers.ScalarMap[str, str]
    def __init__(self, job: _Optional[str] = ..., protocol: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("reached", "reason", "wall_time_s", "protocol", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REACHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    reached: bool
    reason: str
    wall_time_s: float
    protocol: int
    versions: _containers.ScalarMap[str, str]
    def __init__(self, reached: bool = ..., reason: _Optional[str] = ..., wall_time_s: _Optional[float] = ..., protocol: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("name", "wait_s", "restart")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    name: str
    wait_s: float
    restart: bool
    def __init__(self, name: _Optional[str] = ..., wait_s: _Optional[float] = ..., restart: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AccountsRequest(_message.Message):
    __slots__ = ("slices", "epoch")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    slices: bool
    epoch: int
    def __init__(self, slices: bool = ..., epoch: _Optional[int] = ...) -> None: ...

class EpochAccount(_message.Message):
    __slots__ = ("skipped", "epoch", "samples", "once", "twice", "never", "workers", "slices")
    class WorkersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ONCE_FIELD_NUMBER: _ClassVar[int]
    TWICE_FIELD_NUMBER: _ClassVar[int]
    NEVER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    skipped: int
    epoch: int
    samples: int
    once: int
    twice: int
    never: int
    workers: _containers.ScalarMap[str, int]
    slices: _containers.RepeatedCompositeFieldContainer[SliceAccount]
    def __init__(self, skipped: _Optional[int] = ..., epoch: _Optional[int] = ..., samples: _Optional[int] = ..., once: _Optional[int] = ..., twice: _Optional[int] = ..., never: _Optional[int] = ..., workers: _Optional[_Mapping[str, int]] = ..., slices: _Optional[_Iterable[_Union[SliceAccount, _Mapping]]] = ...) -> None: ...

class SliceAccount(_message.Message):
    __slots__ = ("index", "workers", "slices")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    index: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    slices: int
    def __init__(self, index: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ..., slices: _Optional[int] = ...) -> None: ...

class AccountsResponse(_message.Message):
    __slots__ = ("epochs", "total", "begun", "version", "timeline")
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    epochs: _containers.RepeatedCompositeFieldContainer[EpochAccount]
    total: EpochAccount
    begun: int
    version: int
    timeline: int
    def __init__(self, epochs: _Optional[_Iterable[_Union[EpochAccount, _Mapping]]] = ..., total: _Optional[_Union[EpochAccount, _Mapping]] = ..., begun: _Optional[int] = ..., version: _Optional[int] = ..., timeline: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("member", "timeline")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    member: int
    timeline: int
    def __init__(self, member: _Optional[int] = ..., timeline: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("versions", "waiting_for")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    waiting_for: str
    def __init__(self, versions: _Optional[_Iterable[int]] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("member", "timeline", "version", "epoch")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    member: int
    timeline: int
    version: int
    epoch: int
    def __init__(self, member: _Optional[int] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ("rolled_back", "version")
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    rolled_back: bool
    version: int
    def __init__(self, rolled_back: bool = ..., version: _Optional[int] = ...) -> None: ...

class LoadPlace(_message.Message):
    __slots__ = ("epoch", "count", "digest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    count: int
    digest: str
    def __init__(self, epoch: _Optional[int] = ..., count: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Agreed(_message.Message):
    __slots__ = ("name", "epoch", "count", "value", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    count: int
    value: float
    version: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., count: _Optional[int] = ..., value: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class AgreeRequest(_message.Message):
    __slots__ = ("member", "mine", "name", "awaited", "timeline")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MINE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    member: int
    mine: Agreed
    name: str
    awaited: int
    timeline: int
    def __init__(self, member: _Optional[int] = ..., mine: _Optional[_Union[Agreed, _Mapping]] = ..., name: _Optional[str] = ..., awaited: _Optional[int] = ..., timeline: _Optional[int] = ...) -> None: ...

class AgreeResponse(_message.Message):
    __slots__ = ("agreed",)
    AGREED_FIELD_NUMBER: _ClassVar[int]
    agreed: _containers.RepeatedCompositeFieldContainer[Agreed]
    def __init__(self, agreed: _Optional[_Iterable[_Union[Agreed, _Mapping]]] = ...) -> None: ...

class EvaluatedBatch(_message.Message):
    __slots__ = ("index", "value")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    index: int
    value: bytes
    def __init__(self, index: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("member", "timeline", "epoch", "count", "slices", "done", "wants", "wait_s", "first", "leaves", "undone")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    UNDONE_FIELD_NUMBER: _ClassVar[int]
    member: int
    timeline: int
    epoch: int
    count: int
    slices: int
    done: _containers.RepeatedCompositeFieldContainer[EvaluatedBatch]
    wants: bool
    wait_s: float
    first: int
    leaves: bool
    undone: bool
    def __init__(self, member: _Optional[int] = ..., timeline: _Optional[int] = ..., epoch: _Optional[int] = ..., count: _Optional[int] = ..., slices: _Optional[int] = ..., done: _Optional[_Iterable[_Union[EvaluatedBatch, _Mapping]]] = ..., wants: bool = ..., wait_s: _Optional[float] = ..., first: _Optional[int] = ..., leaves: bool = ..., undone: bool = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("slices", "complete", "results", "waiting_for")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedScalarFieldContainer[int]
    complete: bool
    results: _containers.RepeatedCompositeFieldContainer[EvaluatedBatch]
    waiting_for: str
    def __init__(self, slices: _Optional[_Iterable[int]] = ..., complete: bool = ..., results: _Optional[_Iterable[_Union[EvaluatedBatch, _Mapping]]] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("member", "timeline", "version", "total", "offset", "data")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    member: int
    timeline: int
    version: int
    total: int
    offset: int
    data: bytes
    def __init__(self, member: _Optional[int] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., total: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class KeepResponse(_message.Message):
    __slots__ = ("wanted",)
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: bool
    def __init__(self, wanted: bool = ...) -> None: ...

class KeptRequest(_message.Message):
    __slots__ = ("member", "base", "offset", "number")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    member: int
    base: bool
    offset: int
    number: int
    def __init__(self, member: _Optional[int] = ..., base: bool = ..., offset: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class KeptResponse(_message.Message):
    __slots__ = ("number", "version", "total", "data")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: int
    total: int
    data: bytes
    def __init__(self, number: _Optional[int] = ..., version: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RegisteredFile(_message.Message):
    __slots__ = ("checkpoint", "name", "bytes", "sha256", "version", "place")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    name: str
    bytes: int
    sha256: str
    version: int
    place: str
    def __init__(self, checkpoint: _Optional[str] = ..., name: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., version: _Optional[int] = ..., place: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("member", "timeline", "place")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    member: int
    timeline: int
    place: LoadPlace
    def __init__(self, member: _Optional[int] = ..., timeline: _Optional[int] = ..., place: _Optional[_Union[LoadPlace, _Mapping]] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("done", "waiting_for")
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    done: bool
    waiting_for: str
    def __init__(self, done: bool = ..., waiting_for: _Optional[str] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("member", "slice")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    member: int
    slice: _types_pb2.SliceRef
    def __init__(self, member: _Optional[int] = ..., slice: _Optional[_Union[_types_pb2.SliceRef, _Mapping]] = ...) -> None: ...

class BeginResponse(_message.Message):
    __slots__ = ("skip",)
    SKIP_FIELD_NUMBER: _ClassVar[int]
    skip: bool
    def __init__(self, skip: bool = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("workers", "wait_s", "servers")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    wait_s: float
    servers: int
    def __init__(self, workers: _Optional[int] = ..., wait_s: _Optional[float] = ..., servers: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("workers", "note", "servers", "paused_s")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    workers: int
    note: str
    servers: int
    paused_s: float
    def __init__(self, workers: _Optional[int] = ..., note: _Optional[str] = ..., servers: _Optional[int] = ..., paused_s: _Optional[float] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason", "state", "said")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    state: str
    said: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reason: _Optional[str] = ..., state: _Optional[str] = ..., said: _Optional[_Iterable[str]] = ...) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("wait_s",)
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    wait_s: float
    def __init__(self, wait_s: _Optional[float] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("name", "place")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    place: str
    def __init__(self, name: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("number", "steps", "profiler", "received", "wait_s", "stop")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROFILER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    number: int
    steps: int
    profiler: bool
    received: int
    wait_s: float
    stop: bool
    def __init__(self, number: _Optional[int] = ..., steps: _Optional[int] = ..., profiler: bool = ..., received: _Optional[int] = ..., wait_s: _Optional[float] = ..., stop: bool = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("number", "parts", "over", "missing", "processes", "dropped")
    class MissingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    number: int
    parts: _containers.RepeatedCompositeFieldContainer[TracePart]
    over: bool
    missing: _containers.ScalarMap[str, str]
    processes: _containers.RepeatedScalarFieldContainer[str]
    dropped: int
    def __init__(self, number: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[TracePart, _Mapping]]] = ..., over: bool = ..., missing: _Optional[_Mapping[str, str]] = ..., processes: _Optional[_Iterable[str]] = ..., dropped: _Optional[int] = ...) -> None: ...

class TracePart(_message.Message):
    __slots__ = ("member", "number", "spans", "clocks", "dropped", "steps", "last", "pid", "host", "clock", "name", "index")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    member: int
    number: int
    spans: _containers.RepeatedCompositeFieldContainer[TraceSpan]
    clocks: _containers.RepeatedCompositeFieldContainer[ClockSample]
    dropped: int
    steps: int
    last: bool
    pid: int
    host: str
    clock: str
    name: str
    index: int
    def __init__(self, member: _Optional[int] = ..., number: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[TraceSpan, _Mapping]]] = ..., clocks: _Optional[_Iterable[_Union[ClockSample, _Mapping]]] = ..., dropped: _Optional[int] = ..., steps: _Optional[int] = ..., last: bool = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., clock: _Optional[str] = ..., name: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class TraceSpan(_message.Message):
    __slots__ = ("name", "track", "begin_ns", "duration_ns", "step", "flows", "notes")
    class NotesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    track: str
    begin_ns: int
    duration_ns: int
    step: int
    flows: _containers.RepeatedScalarFieldContainer[int]
    notes: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., track: _Optional[str] = ..., begin_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., step: _Optional[int] = ..., flows: _Optional[_Iterable[int]] = ..., notes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ClockSample(_message.Message):
    __slots__ = ("asked_ns", "answered_ns", "coordinator_ns")
    ASKED_NS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_NS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_NS_FIELD_NUMBER: _ClassVar[int]
    asked_ns: int
    answered_ns: int
    coordinator_ns: int
    def __init__(self, asked_ns: _Optional[int] = ..., answered_ns: _Optional[int] = ..., coordinator_ns: _Optional[int] = ...) -> None: ...

class HandInResponse(_message.Message):
    __slots__ = ("clock_ns",)
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    clock_ns: int
    def __init__(self, clock_ns: _Optional[int] = ...) -> None: ...

class JobRecord(_message.Message):
    __slots__ = ("view", "settings", "expected_servers", "expected_workers", "members", "next_member", "data", "layout", "ready", "departed", "training_s", "lost", "finished", "summary", "address", "async_from", "checkpoint", "rollbacks", "steps_redone", "wanted_workers", "broken_promises", "losses", "missed", "poisoned", "deaths", "deaths_in_a_row", "samples_before", "wanted", "edition", "script_ended", "orderly", "tallies", "epochs_planned", "histories", "loaded", "loading", "holders", "promotions", "takeovers", "repairs", "hurt", "plan", "newest_plan", "moved", "carried_from", "agreed", "registered", "wanted_servers", "events")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class BrokenPromisesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VIEW_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_MEMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    TRAINING_S_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ASYNC_FROM_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_REDONE_FIELD_NUMBER: _ClassVar[int]
    WANTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_PROMISES_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    POISONED_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    DEATHS_IN_A_ROW_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    EDITION_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_ENDED_FIELD_NUMBER: _ClassVar[int]
    ORDERLY_FIELD_NUMBER: _ClassVar[int]
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    HISTORIES_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PROMOTIONS_FIELD_NUMBER: _ClassVar[int]
    TAKEOVERS_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    HURT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PLAN_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FROM_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    WANTED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    view: _types_pb2.View
    settings: _containers.ScalarMap[str, str]
    expected_servers: int
    expected_workers: int
    members: _containers.RepeatedCompositeFieldContainer[MemberRecord]
    next_member: int
    data: _types_pb2.DataSpec
    layout: str
    ready: bool
    departed: _containers.RepeatedCompositeFieldContainer[ProcessStatus]
    training_s: float
    lost: _containers.RepeatedScalarFieldContainer[str]
    finished: bool
    summary: str
    address: str
    async_from: int
    checkpoint: str
    rollbacks: int
    steps_redone: int
    wanted_workers: int
    broken_promises: _containers.ScalarMap[str, str]
    losses: int
    missed: _containers.RepeatedScalarFieldContainer[str]
    poisoned: _containers.RepeatedCompositeFieldContainer[_types_pb2.SliceRef]
    deaths: _containers.RepeatedCompositeFieldContainer[_types_pb2.SliceRef]
    deaths_in_a_row: int
    samples_before: int
    wanted: _types_pb2.Consistency
    edition: int
    script_ended: bool
    orderly: bool
    tallies: _containers.RepeatedCompositeFieldContainer[Tally]
    epochs_planned: int
    histories: _containers.RepeatedScalarFieldContainer[str]
    loaded: LoadPlace
    loading: LoadPlace
    holders: _containers.RepeatedCompositeFieldContainer[HoldersRecord]
    promotions: int
    takeovers: int
    repairs: int
    hurt: bool
    plan: int
    newest_plan: int
    moved: bool
    carried_from: int
    agreed: _containers.RepeatedCompositeFieldContainer[Agreed]
    registered: RegisteredFile
    wanted_servers: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., settings: _Optional[_Mapping[str, str]] = ..., expected_servers: _Optional[int] = ..., expected_workers: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberRecord, _Mapping]]] = ..., next_member: _Optional[int] = ..., data: _Optional[_Union[_types_pb2.DataSpec, _Mapping]] = ..., layout: _Optional[str] = ..., ready: bool = ..., departed: _Optional[_Iterable[_Union[ProcessStatus, _Mapping]]] = ..., training_s: _Optional[float] = ..., lost: _Optional[_Iterable[str]] = ..., finished: bool = ..., summary: _Optional[str] = ..., address: _Optional[str] = ..., async_from: _Optional[int] = ..., checkpoint: _Optional[str] = ..., rollbacks: _Optional[int] = ..., steps_redone: _Optional[int] = ..., wanted_workers: _Optional[int] = ..., broken_promises: _Optional[_Mapping[str, str]] = ..., losses: _Optional[int] = ..., missed: _Optional[_Iterable[str]] = ..., poisoned: _Optional[_Iterable[_Union[_types_pb2.SliceRef, _Mapping]]] = ..., deaths: _Optional[_Iterable[_Union[_types_pb2.SliceRef, _Mapping]]] = ..., deaths_in_a_row: _Optional[int] = ..., samples_before: _Optional[int] = ..., wanted: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., edition: _Optional[int] = ..., script_ended: bool = ..., orderly: bool = ..., tallies: _Optional[_Iterable[_Union[Tally, _Mapping]]] = ..., epochs_planned: _Optional[int] = ..., histories: _Optional[_Iterable[str]] = ..., loaded: _Optional[_Union[LoadPlace, _Mapping]] = ..., loading: _Optional[_Union[LoadPlace, _Mapping]] = ..., holders: _Optional[_Iterable[_Union[HoldersRecord, _Mapping]]] = ..., promotions: _Optional[int] = ..., takeovers: _Optional[int] = ..., repairs: _Optional[int] = ..., hurt: bool = ..., plan: _Optional[int] = ..., newest_plan: _Optional[int] = ..., moved: bool = ..., carried_from: _Optional[int] = ..., agreed: _Optional[_Iterable[_Union[Agreed, _Mapping]]] = ..., registered: _Optional[_Union[RegisteredFile, _Mapping]] = ..., wanted_servers: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class HoldersRecord(_message.Message):
    __slots__ = ("primary", "backups", "lost")
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    BACKUPS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    primary: int
    backups: _containers.RepeatedCompositeFieldContainer[BackupRecord]
    lost: bool
    def __init__(self, primary: _Optional[int] = ..., backups: _Optional[_Iterable[_Union[BackupRecord, _Mapping]]] = ..., lost: bool = ...) -> None: ...

class BackupRecord(_message.Message):
    __slots__ = ("server", "since", "whole")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    server: int
    since: int
    whole: bool
    def __init__(self, server: _Optional[int] = ..., since: _Optional[int] = ..., whole: bool = ...) -> None: ...

class MemberRecord(_message.Message):
    __slots__ = ("member", "role", "index", "address", "pid", "incarnation", "beside_worker", "restart_command", "metrics_url", "host", "proof", "key")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BESIDE_WORKER_FIELD_NUMBER: _ClassVar[int]
    RESTART_COMMAND_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    member: int
    role: _types_pb2.Role
    index: int
    address: str
    pid: int
    incarnation: int
    beside_worker: bool
    restart_command: str
    metrics_url: str
    host: str
    proof: bytes
    key: bytes
    def __init__(self, member: _Optional[int] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., index: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[int] = ..., beside_worker: bool = ..., restart_command: _Optional[str] = ..., metrics_url: _Optional[str] = ..., host: _Optional[str] = ..., proof: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...
