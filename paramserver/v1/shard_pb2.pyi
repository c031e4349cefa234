from paramserver.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_EXACT: _ClassVar[Encoding]
    ENCODING_BF16: _ClassVar[Encoding]
    ENCODING_FP16: _ClassVar[Encoding]
    ENCODING_INT8: _ClassVar[Encoding]
    ENCODING_TOPK: _ClassVar[Encoding]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_ACCEPTED: _ClassVar[Outcome]
    OUTCOME_DUPLICATE: _ClassVar[Outcome]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREPARE: _ClassVar[Phase]
    PHASE_COMMIT: _ClassVar[Phase]
    PHASE_ABORT: _ClassVar[Phase]

class CopyState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COPY_STATE_UNSPECIFIED: _ClassVar[CopyState]
    COPY_STATE_WRITING: _ClassVar[CopyState]
    COPY_STATE_SAVED: _ClassVar[CopyState]
    COPY_STATE_FAILED: _ClassVar[CopyState]
    COPY_STATE_SKIPPED: _ClassVar[CopyState]

class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCTION_NONE: _ClassVar[Reduction]
    REDUCTION_SUM: _ClassVar[Reduction]
    REDUCTION_AVG: _ClassVar[Reduction]
    REDUCTION_MIN: _ClassVar[Reduction]
    REDUCTION_MAX: _ClassVar[Reduction]
    REDUCTION_PRODUCT: _ClassVar[Reduction]
    REDUCTION_BAND: _ClassVar[Reduction]
    REDUCTION_BOR: _ClassVar[Reduction]
    REDUCTION_BXOR: _ClassVar[Reduction]
ENCODING_EXACT: Encoding
ENCODING_BF16: Encoding
ENCODING_FP16: Encoding
ENCODING_INT8: Encoding
ENCODING_TOPK: Encoding
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_ACCEPTED: Outcome
OUTCOME_DUPLICATE: Outcome
PHASE_UNSPECIFIED: Phase
PHASE_PREPARE: Phase
PHASE_COMMIT: Phase
PHASE_ABORT: Phase
COPY_STATE_UNSPECIFIED: CopyState
COPY_STATE_WRITING: CopyState
COPY_STATE_SAVED: CopyState
COPY_STATE_FAILED: CopyState
COPY_STATE_SKIPPED: CopyState
REDUCTION_NONE: Reduction
REDUCTION_SUM: Reduction
REDUCTION_AVG: Reduction
REDUCTION_MIN: Reduction
REDUCTION_MAX: Reduction
REDUCTION_PRODUCT: Reduction
REDUCTION_BAND: Reduction
REDUCTION_BOR: Reduction
REDUCTION_BXOR: Reduction

class OpenBulkRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenBulkResponse(_message.Message):
    __slots__ = ("port", "token", "reason")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    port: int
    token: bytes
    reason: str
    def __init__(self, port: _Optional[int] = ..., token: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: FrameHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[FrameHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("push", "initialize", "pull", "forward", "catch_up", "chunks", "states", "draft", "acks", "missing")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    push: PushHeader
    initialize: InitializeHeader
    pull: PullHeader
    forward: ForwardHeader
    catch_up: CatchUpHeader
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRef]
    states: _containers.RepeatedCompositeFieldContainer[StateRef]
    draft: int
    acks: _containers.RepeatedCompositeFieldContainer[Ack]
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, push: _Optional[_Union[PushHeader, _Mapping]] = ..., initialize: _Optional[_Union[InitializeHeader, _Mapping]] = ..., pull: _Optional[_Union[PullHeader, _Mapping]] = ..., forward: _Optional[_Union[ForwardHeader, _Mapping]] = ..., catch_up: _Optional[_Union[CatchUpHeader, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[ChunkRef, _Mapping]]] = ..., states: _Optional[_Iterable[_Union[StateRef, _Mapping]]] = ..., draft: _Optional[int] = ..., acks: _Optional[_Iterable[_Union[Ack, _Mapping]]] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("nonce", "chunks")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    chunks: int
    def __init__(self, nonce: _Optional[int] = ..., chunks: _Optional[int] = ...) -> None: ...

class ChunkRef(_message.Message):
    __slots__ = ("index", "start", "bytes", "dtype", "encoding")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: int
    bytes: int
    dtype: _types_pb2.DType
    encoding: Encoding
    def __init__(self, index: _Optional[int] = ..., start: _Optional[int] = ..., bytes: _Optional[int] = ..., dtype: _Optional[_Union[_types_pb2.DType, str]] = ..., encoding: _Optional[_Union[Encoding, str]] = ...) -> None: ...

class StateRef(_message.Message):
    __slots__ = ("tensor", "key", "start", "bytes", "dtype", "scalar")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    key: str
    start: int
    bytes: int
    dtype: str
    scalar: bool
    def __init__(self, tensor: _Optional[int] = ..., key: _Optional[str] = ..., start: _Optional[int] = ..., bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., scalar: bool = ...) -> None: ...

class SyncName(_message.Message):
    __slots__ = ("step", "lo", "hi", "of")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LO_FIELD_NUMBER: _ClassVar[int]
    HI_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    step: int
    lo: int
    hi: int
    of: int
    def __init__(self, step: _Optional[int] = ..., lo: _Optional[int] = ..., hi: _Optional[int] = ..., of: _Optional[int] = ...) -> None: ...

class AsyncName(_message.Message):
    __slots__ = ("epoch", "index")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    index: int
    def __init__(self, epoch: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("job", "timeline", "worker", "sync", "samples", "overflow", "base_version", "clock", "used", "groups", "chunks", "clip_norm", "nonce", "shared", "advances")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    ASYNC_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    ADVANCES_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    worker: int
    sync: SyncName
    samples: int
    overflow: bool
    base_version: int
    clock: int
    used: bytes
    groups: _containers.RepeatedCompositeFieldContainer[_types_pb2.GroupHypers]
    chunks: int
    clip_norm: float
    nonce: int
    shared: SharedPush
    advances: str
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., worker: _Optional[int] = ..., sync: _Optional[_Union[SyncName, _Mapping]] = ..., samples: _Optional[int] = ..., overflow: bool = ..., base_version: _Optional[int] = ..., clock: _Optional[int] = ..., used: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[_types_pb2.GroupHypers, _Mapping]]] = ..., chunks: _Optional[int] = ..., clip_norm: _Optional[float] = ..., nonce: _Optional[int] = ..., shared: _Optional[_Union[SharedPush, _Mapping]] = ..., advances: _Optional[str] = ..., **kwargs) -> None: ...

class SharedPush(_message.Message):
    __slots__ = ("attachment", "slot", "checked")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    slot: int
    checked: bool
    def __init__(self, attachment: _Optional[int] = ..., slot: _Optional[int] = ..., checked: bool = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("outcome", "version", "own")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    version: int
    own: bool
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., version: _Optional[int] = ..., own: bool = ...) -> None: ...

class InitializeHeader(_message.Message):
    __slots__ = ("job", "timeline", "grant", "worker", "chunks", "states", "keep_weights", "keep_states")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    KEEP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_STATES_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    grant: int
    worker: int
    chunks: int
    states: int
    keep_weights: bool
    keep_states: bool
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., grant: _Optional[int] = ..., worker: _Optional[int] = ..., chunks: _Optional[int] = ..., states: _Optional[int] = ..., keep_weights: bool = ..., keep_states: bool = ...) -> None: ...

class InitializeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("job", "timeline", "worker", "min_version", "exact_version", "clock", "join", "latest", "wait_s", "include_frozen", "header_only", "assignment", "shared", "ahead", "encoding", "acks")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_FROZEN_FIELD_NUMBER: _ClassVar[int]
    HEADER_ONLY_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    worker: int
    min_version: int
    exact_version: int
    clock: int
    join: bool
    latest: bool
    wait_s: float
    include_frozen: bool
    header_only: bool
    assignment: Assignment
    shared: SharedPull
    ahead: bool
    encoding: Encoding
    acks: bool
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., worker: _Optional[int] = ..., min_version: _Optional[int] = ..., exact_version: _Optional[int] = ..., clock: _Optional[int] = ..., join: bool = ..., latest: bool = ..., wait_s: _Optional[float] = ..., include_frozen: bool = ..., header_only: bool = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., shared: _Optional[_Union[SharedPull, _Mapping]] = ..., ahead: bool = ..., encoding: _Optional[_Union[Encoding, str]] = ..., acks: bool = ...) -> None: ...

class SharedPull(_message.Message):
    __slots__ = ("attachment", "reading")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    reading: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attachment: _Optional[int] = ..., reading: _Optional[_Iterable[int]] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("ready", "version", "timeline", "consistency", "min_clock", "skipped", "waiting_for", "chunks", "taken", "slot", "draft", "counted", "copied", "advances", "ever_used")
    READY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    MIN_CLOCK_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    ADVANCES_FIELD_NUMBER: _ClassVar[int]
    EVER_USED_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    version: int
    timeline: int
    consistency: _types_pb2.Consistency
    min_clock: int
    skipped: int
    waiting_for: str
    chunks: int
    taken: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    draft: int
    counted: bytes
    copied: bool
    advances: str
    ever_used: bytes
    def __init__(self, ready: bool = ..., version: _Optional[int] = ..., timeline: _Optional[int] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., min_clock: _Optional[int] = ..., skipped: _Optional[int] = ..., waiting_for: _Optional[str] = ..., chunks: _Optional[int] = ..., taken: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., draft: _Optional[int] = ..., counted: _Optional[bytes] = ..., copied: bool = ..., advances: _Optional[str] = ..., ever_used: _Optional[bytes] = ...) -> None: ...

class IdleRequest(_message.Message):
    __slots__ = ("job", "timeline", "worker")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    worker: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., worker: _Optional[int] = ...) -> None: ...

class IdleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("place", "workers", "work_s")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    place: int
    workers: int
    work_s: float
    def __init__(self, place: _Optional[int] = ..., workers: _Optional[int] = ..., work_s: _Optional[float] = ...) -> None: ...

class StealRequest(_message.Message):
    __slots__ = ("job", "timeline", "worker", "step", "of", "assignment", "finished")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    worker: int
    step: int
    of: int
    assignment: Assignment
    finished: _containers.RepeatedCompositeFieldContainer[_types_pb2.Range]
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., worker: _Optional[int] = ..., step: _Optional[int] = ..., of: _Optional[int] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., finished: _Optional[_Iterable[_Union[_types_pb2.Range, _Mapping]]] = ...) -> None: ...

class StealResponse(_message.Message):
    __slots__ = ("slice", "complete")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    slice: int
    complete: bool
    def __init__(self, slice: _Optional[int] = ..., complete: bool = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("job", "generation", "timeline", "shard", "shards", "model", "layout_digest", "consistency", "workers", "peers", "term", "checkpoints", "checkpoint_every", "anew", "record", "keep", "version", "backup", "filling", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    timeline: int
    shard: int
    shards: int
    model: _types_pb2.ModelSpec
    layout_digest: str
    consistency: _types_pb2.Consistency
    workers: _containers.RepeatedCompositeFieldContainer[_types_pb2.WorkerInfo]
    peers: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardInfo]
    term: int
    checkpoints: str
    checkpoint_every: int
    anew: bool
    record: bytes
    keep: bool
    version: int
    backup: bool
    filling: Filling
    incarnation: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., timeline: _Optional[int] = ..., shard: _Optional[int] = ..., shards: _Optional[int] = ..., model: _Optional[_Union[_types_pb2.ModelSpec, _Mapping]] = ..., layout_digest: _Optional[str] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[_types_pb2.WorkerInfo, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[_types_pb2.ShardInfo, _Mapping]]] = ..., term: _Optional[int] = ..., checkpoints: _Optional[str] = ..., checkpoint_every: _Optional[int] = ..., anew: bool = ..., record: _Optional[bytes] = ..., keep: bool = ..., version: _Optional[int] = ..., backup: bool = ..., filling: _Optional[_Union[Filling, _Mapping]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Filling(_message.Message):
    __slots__ = ("sources", "timeline", "version", "ahead", "placement", "address", "repair_mbps")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_MBPS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardInfo]
    timeline: int
    version: int
    ahead: bool
    placement: int
    address: str
    repair_mbps: float
    def __init__(self, sources: _Optional[_Iterable[_Union[_types_pb2.ShardInfo, _Mapping]]] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., ahead: bool = ..., placement: _Optional[int] = ..., address: _Optional[str] = ..., repair_mbps: _Optional[float] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("layout_digest", "whole")
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    layout_digest: str
    whole: bool
    def __init__(self, layout_digest: _Optional[str] = ..., whole: bool = ...) -> None: ...

class FeedRequest(_message.Message):
    __slots__ = ("job", "timeline", "plan", "address", "feed", "chunks", "repair_mbps")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_MBPS_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    plan: int
    address: str
    feed: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    repair_mbps: float
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., plan: _Optional[int] = ..., address: _Optional[str] = ..., feed: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ..., repair_mbps: _Optional[float] = ...) -> None: ...

class FeedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ActivateRequest(_message.Message):
    __slots__ = ("job", "generation", "timeline", "grant", "term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    timeline: int
    grant: int
    term: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., timeline: _Optional[int] = ..., grant: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class ActivateResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class SetMembersRequest(_message.Message):
    __slots__ = ("job", "generation", "timeline", "workers", "term", "record", "plan", "settled")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    timeline: int
    workers: _containers.RepeatedCompositeFieldContainer[_types_pb2.WorkerInfo]
    term: int
    record: bytes
    plan: int
    settled: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., timeline: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[_types_pb2.WorkerInfo, _Mapping]]] = ..., term: _Optional[int] = ..., record: _Optional[bytes] = ..., plan: _Optional[int] = ..., settled: _Optional[int] = ...) -> None: ...

class SetMembersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetConsistencyRequest(_message.Message):
    __slots__ = ("job", "generation", "timeline", "consistency", "phase", "term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    timeline: int
    consistency: _types_pb2.Consistency
    phase: Phase
    term: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., timeline: _Optional[int] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., term: _Optional[int] = ...) -> None: ...

class SetConsistencyResponse(_message.Message):
    __slots__ = ("scheduled", "version")
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    scheduled: bool
    version: int
    def __init__(self, scheduled: bool = ..., version: _Optional[int] = ...) -> None: ...

class ShareNormsRequest(_message.Message):
    __slots__ = ("job", "timeline", "step", "shard", "chunks", "squares")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    step: int
    shard: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    squares: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., step: _Optional[int] = ..., shard: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ..., squares: _Optional[_Iterable[float]] = ...) -> None: ...

class ShareNormsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("job", "timeline", "min_version", "wait_s", "chunks", "facts")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    min_version: int
    wait_s: float
    chunks: _containers.RepeatedScalarFieldContainer[int]
    facts: bool
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., min_version: _Optional[int] = ..., wait_s: _Optional[float] = ..., chunks: _Optional[_Iterable[int]] = ..., facts: bool = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("job", "record")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    job: str
    record: bool
    def __init__(self, job: _Optional[str] = ..., record: bool = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("version", "consistency", "applied", "duplicate", "skipped", "refused", "bytes_pushed", "bytes_pulled", "max_clock_spread", "waiting_for", "generation", "timeline", "clocks", "shard_bytes", "missing", "missing_of", "term", "incarnation", "holds", "active", "scheduled", "committed", "copies", "checkpoint_pause_s", "checkpoint_write_s", "samples", "record", "model", "applied_before", "shard", "backup", "whole", "placement", "backups", "times", "open", "held", "staleness")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PULLED_FIELD_NUMBER: _ClassVar[int]
    MAX_CLOCK_SPREAD_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MISSING_OF_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_WRITE_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    APPLIED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    BACKUPS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    version: int
    consistency: _types_pb2.Consistency
    applied: int
    duplicate: int
    skipped: int
    refused: int
    bytes_pushed: int
    bytes_pulled: int
    max_clock_spread: int
    waiting_for: str
    generation: int
    timeline: int
    clocks: _containers.RepeatedCompositeFieldContainer[WorkerClock]
    shard_bytes: int
    missing: _containers.RepeatedCompositeFieldContainer[_types_pb2.Range]
    missing_of: int
    term: int
    incarnation: int
    holds: str
    active: bool
    scheduled: _types_pb2.Consistency
    committed: bool
    copies: _containers.RepeatedCompositeFieldContainer[CopyStatus]
    checkpoint_pause_s: float
    checkpoint_write_s: float
    samples: int
    record: bytes
    model: _types_pb2.ModelSpec
    applied_before: int
    shard: int
    backup: bool
    whole: bool
    placement: int
    backups: _containers.RepeatedCompositeFieldContainer[BackupStatus]
    times: _containers.RepeatedCompositeFieldContainer[VersionTimes]
    open: VersionTimes
    held: _containers.RepeatedCompositeFieldContainer[Hold]
    staleness: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., applied: _Optional[int] = ..., duplicate: _Optional[int] = ..., skipped: _Optional[int] = ..., refused: _Optional[int] = ..., bytes_pushed: _Optional[int] = ..., bytes_pulled: _Optional[int] = ..., max_clock_spread: _Optional[int] = ..., waiting_for: _Optional[str] = ..., generation: _Optional[int] = ..., timeline: _Optional[int] = ..., clocks: _Optional[_Iterable[_Union[WorkerClock, _Mapping]]] = ..., shard_bytes: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[_types_pb2.Range, _Mapping]]] = ..., missing_of: _Optional[int] = ..., term: _Optional[int] = ..., incarnation: _Optional[int] = ..., holds: _Optional[str] = ..., active: bool = ..., scheduled: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., committed: bool = ..., copies: _Optional[_Iterable[_Union[CopyStatus, _Mapping]]] = ..., checkpoint_pause_s: _Optional[float] = ..., checkpoint_write_s: _Optional[float] = ..., samples: _Optional[int] = ..., record: _Optional[bytes] = ..., model: _Optional[_Union[_types_pb2.ModelSpec, _Mapping]] = ..., applied_before: _Optional[int] = ..., shard: _Optional[int] = ..., backup: bool = ..., whole: bool = ..., placement: _Optional[int] = ..., backups: _Optional[_Iterable[_Union[BackupStatus, _Mapping]]] = ..., times: _Optional[_Iterable[_Union[VersionTimes, _Mapping]]] = ..., open: _Optional[_Union[VersionTimes, _Mapping]] = ..., held: _Optional[_Iterable[_Union[Hold, _Mapping]]] = ..., staleness: _Optional[_Iterable[int]] = ...) -> None: ...

class VersionTimes(_message.Message):
    __slots__ = ("step", "first_s", "others_s", "last_s", "first", "others", "last", "lo", "hi", "of", "update_s", "forward_s", "published_s", "starved_s", "paused_s", "asynchronous", "timeline")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FIRST_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_S_FIELD_NUMBER: _ClassVar[int]
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LO_FIELD_NUMBER: _ClassVar[int]
    HI_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    UPDATE_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_S_FIELD_NUMBER: _ClassVar[int]
    STARVED_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    ASYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    step: int
    first_s: float
    others_s: float
    last_s: float
    first: int
    others: int
    last: int
    lo: int
    hi: int
    of: int
    update_s: float
    forward_s: float
    published_s: float
    starved_s: float
    paused_s: float
    asynchronous: bool
    timeline: int
    def __init__(self, step: _Optional[int] = ..., first_s: _Optional[float] = ..., others_s: _Optional[float] = ..., last_s: _Optional[float] = ..., first: _Optional[int] = ..., others: _Optional[int] = ..., last: _Optional[int] = ..., lo: _Optional[int] = ..., hi: _Optional[int] = ..., of: _Optional[int] = ..., update_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., published_s: _Optional[float] = ..., starved_s: _Optional[float] = ..., paused_s: _Optional[float] = ..., asynchronous: bool = ..., timeline: _Optional[int] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("worker", "by", "clock", "seconds")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    by: int
    clock: int
    seconds: float
    def __init__(self, worker: _Optional[int] = ..., by: _Optional[int] = ..., clock: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class BackupStatus(_message.Message):
    __slots__ = ("place", "bytes", "of", "whole")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    place: BackupPlace
    bytes: int
    of: int
    whole: bool
    def __init__(self, place: _Optional[_Union[BackupPlace, _Mapping]] = ..., bytes: _Optional[int] = ..., of: _Optional[int] = ..., whole: bool = ...) -> None: ...

class SavedFile(_message.Message):
    __slots__ = ("name", "bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class CopyStatus(_message.Message):
    __slots__ = ("timeline", "version", "state", "reason", "weights", "optimizer", "finite", "revision")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    version: int
    state: CopyState
    reason: str
    weights: SavedFile
    optimizer: SavedFile
    finite: bool
    revision: int
    def __init__(self, timeline: _Optional[int] = ..., version: _Optional[int] = ..., state: _Optional[_Union[CopyState, str]] = ..., reason: _Optional[str] = ..., weights: _Optional[_Union[SavedFile, _Mapping]] = ..., optimizer: _Optional[_Union[SavedFile, _Mapping]] = ..., finite: bool = ..., revision: _Optional[int] = ...) -> None: ...

class ProbePlaceRequest(_message.Message):
    __slots__ = ("job", "place", "question", "answer")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    job: str
    place: str
    question: str
    answer: str
    def __init__(self, job: _Optional[str] = ..., place: _Optional[str] = ..., question: _Optional[str] = ..., answer: _Optional[str] = ...) -> None: ...

class ProbePlaceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("configure", "manifest", "grant", "place")
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    configure: ConfigureRequest
    manifest: str
    grant: int
    place: str
    def __init__(self, configure: _Optional[_Union[ConfigureRequest, _Mapping]] = ..., manifest: _Optional[str] = ..., grant: _Optional[int] = ..., place: _Optional[str] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("version", "layout_digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    layout_digest: str
    def __init__(self, version: _Optional[int] = ..., layout_digest: _Optional[str] = ...) -> None: ...

class CutRequest(_message.Message):
    __slots__ = ("job", "timeline", "term", "step", "version", "missing", "of", "number", "slices", "wait_s")
    class Step(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STEP_UNSPECIFIED: _ClassVar[CutRequest.Step]
        STEP_HOLD: _ClassVar[CutRequest.Step]
        STEP_COPY: _ClassVar[CutRequest.Step]
        STEP_LET_GO: _ClassVar[CutRequest.Step]
        STEP_FILL: _ClassVar[CutRequest.Step]
        STEP_PAUSE: _ClassVar[CutRequest.Step]
        STEP_REACH: _ClassVar[CutRequest.Step]
        STEP_GO_ON: _ClassVar[CutRequest.Step]
        STEP_STAND: _ClassVar[CutRequest.Step]
    STEP_UNSPECIFIED: CutRequest.Step
    STEP_HOLD: CutRequest.Step
    STEP_COPY: CutRequest.Step
    STEP_LET_GO: CutRequest.Step
    STEP_FILL: CutRequest.Step
    STEP_PAUSE: CutRequest.Step
    STEP_REACH: CutRequest.Step
    STEP_GO_ON: CutRequest.Step
    STEP_STAND: CutRequest.Step
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    term: int
    step: CutRequest.Step
    version: int
    missing: _containers.RepeatedCompositeFieldContainer[_types_pb2.Range]
    of: int
    number: int
    slices: _containers.RepeatedCompositeFieldContainer[EpochSlices]
    wait_s: float
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., term: _Optional[int] = ..., step: _Optional[_Union[CutRequest.Step, str]] = ..., version: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[_types_pb2.Range, _Mapping]]] = ..., of: _Optional[int] = ..., number: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[EpochSlices, _Mapping]]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class CutResponse(_message.Message):
    __slots__ = ("taken", "version", "counted", "waiting_for")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    version: int
    counted: _containers.RepeatedCompositeFieldContainer[EpochSlices]
    waiting_for: str
    def __init__(self, taken: bool = ..., version: _Optional[int] = ..., counted: _Optional[_Iterable[_Union[EpochSlices, _Mapping]]] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("job", "timeline", "term", "versions")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    term: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., term: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class LedgerResponse(_message.Message):
    __slots__ = ("first", "lo", "hi", "of", "worker", "folded_steps", "counted", "names", "version", "timeline")
    class NamesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LO_FIELD_NUMBER: _ClassVar[int]
    HI_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FOLDED_STEPS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    first: _containers.RepeatedScalarFieldContainer[int]
    lo: _containers.RepeatedScalarFieldContainer[int]
    hi: _containers.RepeatedScalarFieldContainer[int]
    of: _containers.RepeatedScalarFieldContainer[int]
    worker: _containers.RepeatedScalarFieldContainer[int]
    folded_steps: int
    counted: _containers.RepeatedCompositeFieldContainer[EpochSlices]
    names: _containers.ScalarMap[int, str]
    version: int
    timeline: int
    def __init__(self, first: _Optional[_Iterable[int]] = ..., lo: _Optional[_Iterable[int]] = ..., hi: _Optional[_Iterable[int]] = ..., of: _Optional[_Iterable[int]] = ..., worker: _Optional[_Iterable[int]] = ..., folded_steps: _Optional[int] = ..., counted: _Optional[_Iterable[_Union[EpochSlices, _Mapping]]] = ..., names: _Optional[_Mapping[int, str]] = ..., version: _Optional[int] = ..., timeline: _Optional[int] = ...) -> None: ...

class CopiedRequest(_message.Message):
    __slots__ = ("job", "timeline", "version", "chunks")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    version: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class CountedRequest(_message.Message):
    __slots__ = ("job", "timeline")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ...) -> None: ...

class EpochSlices(_message.Message):
    __slots__ = ("epoch", "slices", "epochs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    slices: _containers.RepeatedCompositeFieldContainer[_types_pb2.Range]
    epochs: int
    def __init__(self, epoch: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[_types_pb2.Range, _Mapping]]] = ..., epochs: _Optional[int] = ...) -> None: ...

class CountedResponse(_message.Message):
    __slots__ = ("epochs",)
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epochs: _containers.RepeatedCompositeFieldContainer[EpochSlices]
    def __init__(self, epochs: _Optional[_Iterable[_Union[EpochSlices, _Mapping]]] = ...) -> None: ...

class WorkerClock(_message.Message):
    __slots__ = ("worker", "clock")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    worker: int
    clock: int
    def __init__(self, worker: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("push", "pull")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    push: PushHeader
    pull: PullRequest
    def __init__(self, push: _Optional[_Union[PushHeader, _Mapping]] = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("pushed", "pulled")
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    pushed: PushResponse
    pulled: PullHeader
    def __init__(self, pushed: _Optional[_Union[PushResponse, _Mapping]] = ..., pulled: _Optional[_Union[PullHeader, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("job", "timeline", "worker", "layout_digest", "meeting", "inbox_bytes", "host")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    INBOX_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    worker: int
    layout_digest: str
    meeting: str
    inbox_bytes: int
    host: str
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., worker: _Optional[int] = ..., layout_digest: _Optional[str] = ..., meeting: _Optional[str] = ..., inbox_bytes: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("attachment", "weights_bytes", "refusal")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    weights_bytes: int
    refusal: str
    def __init__(self, attachment: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class SetHoldersRequest(_message.Message):
    __slots__ = ("job", "timeline", "term", "placement", "primary", "backups", "peers", "consistency", "repair_mbps")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    BACKUPS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    REPAIR_MBPS_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    term: int
    placement: int
    primary: bool
    backups: _containers.RepeatedCompositeFieldContainer[BackupPlace]
    peers: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardInfo]
    consistency: _types_pb2.Consistency
    repair_mbps: float
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., term: _Optional[int] = ..., placement: _Optional[int] = ..., primary: bool = ..., backups: _Optional[_Iterable[_Union[BackupPlace, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[_types_pb2.ShardInfo, _Mapping]]] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., repair_mbps: _Optional[float] = ...) -> None: ...

class BackupPlace(_message.Message):
    __slots__ = ("address", "since", "whole")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    address: str
    since: int
    whole: bool
    def __init__(self, address: _Optional[str] = ..., since: _Optional[int] = ..., whole: bool = ...) -> None: ...

class SetHoldersResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class ContributionRef(_message.Message):
    __slots__ = ("sync", "worker", "nonce", "filler")
    SYNC_FIELD_NUMBER: _ClassVar[int]
    ASYNC_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    FILLER_FIELD_NUMBER: _ClassVar[int]
    sync: SyncName
    worker: int
    nonce: int
    filler: bool
    def __init__(self, sync: _Optional[_Union[SyncName, _Mapping]] = ..., worker: _Optional[int] = ..., nonce: _Optional[int] = ..., filler: bool = ..., **kwargs) -> None: ...

class ForwardHeader(_message.Message):
    __slots__ = ("job", "timeline", "placement", "version", "parts", "samples", "overflow", "used", "groups", "chunks", "clocks", "min_clock", "consistency", "shared", "draft", "ahead", "feed", "advances")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIN_CLOCK_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    ADVANCES_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    placement: int
    version: int
    parts: _containers.RepeatedCompositeFieldContainer[ContributionRef]
    samples: int
    overflow: bool
    used: bytes
    groups: _containers.RepeatedCompositeFieldContainer[_types_pb2.GroupHypers]
    chunks: int
    clocks: _containers.RepeatedCompositeFieldContainer[WorkerClock]
    min_clock: int
    consistency: _types_pb2.Consistency
    shared: SharedForward
    draft: int
    ahead: bool
    feed: int
    advances: str
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., placement: _Optional[int] = ..., version: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[ContributionRef, _Mapping]]] = ..., samples: _Optional[int] = ..., overflow: bool = ..., used: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[_types_pb2.GroupHypers, _Mapping]]] = ..., chunks: _Optional[int] = ..., clocks: _Optional[_Iterable[_Union[WorkerClock, _Mapping]]] = ..., min_clock: _Optional[int] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., shared: _Optional[_Union[SharedForward, _Mapping]] = ..., draft: _Optional[int] = ..., ahead: bool = ..., feed: _Optional[int] = ..., advances: _Optional[str] = ...) -> None: ...

class SharedForward(_message.Message):
    __slots__ = ("meeting",)
    MEETING_FIELD_NUMBER: _ClassVar[int]
    meeting: str
    def __init__(self, meeting: _Optional[str] = ...) -> None: ...

class MadeLentRequest(_message.Message):
    __slots__ = ("job", "timeline", "placement", "version")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    placement: int
    version: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., placement: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class MadeLentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("unreadable",)
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    unreadable: bool
    def __init__(self, unreadable: bool = ...) -> None: ...

class LendRequest(_message.Message):
    __slots__ = ("job", "timeline", "placement", "layout_digest", "meeting", "bytes", "host")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    placement: int
    layout_digest: str
    meeting: str
    bytes: int
    host: str
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., placement: _Optional[int] = ..., layout_digest: _Optional[str] = ..., meeting: _Optional[str] = ..., bytes: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class LendResponse(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class CatchUpHeader(_message.Message):
    __slots__ = ("job", "timeline", "placement", "version", "chunks", "states", "facts", "first", "feed")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    placement: int
    version: int
    chunks: int
    states: int
    facts: ShardFacts
    first: bool
    feed: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., placement: _Optional[int] = ..., version: _Optional[int] = ..., chunks: _Optional[int] = ..., states: _Optional[int] = ..., facts: _Optional[_Union[ShardFacts, _Mapping]] = ..., first: bool = ..., feed: _Optional[int] = ...) -> None: ...

class CatchUpResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardFacts(_message.Message):
    __slots__ = ("applied", "applied_before", "duplicate", "skipped", "samples", "ledger", "consistency", "counted", "clocks", "min_clock", "advances", "ever_used")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIN_CLOCK_FIELD_NUMBER: _ClassVar[int]
    ADVANCES_FIELD_NUMBER: _ClassVar[int]
    EVER_USED_FIELD_NUMBER: _ClassVar[int]
    applied: int
    applied_before: int
    duplicate: int
    skipped: int
    samples: int
    ledger: LedgerResponse
    consistency: _types_pb2.Consistency
    counted: bytes
    clocks: _containers.RepeatedCompositeFieldContainer[WorkerClock]
    min_clock: int
    advances: str
    ever_used: bytes
    def __init__(self, applied: _Optional[int] = ..., applied_before: _Optional[int] = ..., duplicate: _Optional[int] = ..., skipped: _Optional[int] = ..., samples: _Optional[int] = ..., ledger: _Optional[_Union[LedgerResponse, _Mapping]] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., counted: _Optional[bytes] = ..., clocks: _Optional[_Iterable[_Union[WorkerClock, _Mapping]]] = ..., min_clock: _Optional[int] = ..., advances: _Optional[str] = ..., ever_used: _Optional[bytes] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("job", "group", "rank", "size", "ranks", "channel", "number", "piece", "what", "reduction", "dtype", "bytes", "data", "takes", "wait_s", "done", "opens", "leaves", "timeline", "mine")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    MINE_FIELD_NUMBER: _ClassVar[int]
    job: str
    group: str
    rank: int
    size: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    channel: str
    number: int
    piece: int
    what: str
    reduction: Reduction
    dtype: str
    bytes: int
    data: bytes
    takes: bool
    wait_s: float
    done: int
    opens: bool
    leaves: bool
    timeline: int
    mine: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., channel: _Optional[str] = ..., number: _Optional[int] = ..., piece: _Optional[int] = ..., what: _Optional[str] = ..., reduction: _Optional[_Union[Reduction, str]] = ..., dtype: _Optional[str] = ..., bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., takes: bool = ..., wait_s: _Optional[float] = ..., done: _Optional[int] = ..., opens: bool = ..., leaves: bool = ..., timeline: _Optional[int] = ..., mine: _Optional[_Iterable[int]] = ...) -> None: ...
