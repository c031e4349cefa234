from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_SYNC: _ClassVar[Mode]
    MODE_ASYNC: _ClassVar[Mode]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_SERVER: _ClassVar[Role]
    ROLE_OBSERVER: _ClassVar[Role]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]

class TensorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_KIND_UNSPECIFIED: _ClassVar[TensorKind]
    TENSOR_KIND_PARAMETER: _ClassVar[TensorKind]
    TENSOR_KIND_BUFFER: _ClassVar[TensorKind]
    TENSOR_KIND_FROZEN: _ClassVar[TensorKind]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_WAITING: _ClassVar[JobState]
    JOB_STATE_INITIALISING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_DONE: _ClassVar[JobState]
    JOB_STATE_STOPPED: _ClassVar[JobState]
    JOB_STATE_RECOVERING: _ClassVar[JobState]
MODE_UNSPECIFIED: Mode
MODE_SYNC: Mode
MODE_ASYNC: Mode
ROLE_UNSPECIFIED: Role
ROLE_WORKER: Role
ROLE_SERVER: Role
ROLE_OBSERVER: Role
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
TENSOR_KIND_UNSPECIFIED: TensorKind
TENSOR_KIND_PARAMETER: TensorKind
TENSOR_KIND_BUFFER: TensorKind
TENSOR_KIND_FROZEN: TensorKind
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_WAITING: JobState
JOB_STATE_INITIALISING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_DONE: JobState
JOB_STATE_STOPPED: JobState
JOB_STATE_RECOVERING: JobState

class Consistency(_message.Message):
    __slots__ = ("revision", "mode", "staleness", "from_version")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    FROM_VERSION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    mode: Mode
    staleness: int
    from_version: int
    def __init__(self, revision: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., staleness: _Optional[int] = ..., from_version: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype", "kind", "group", "aliases", "persistent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    kind: TensorKind
    group: int
    aliases: _containers.RepeatedScalarFieldContainer[str]
    persistent: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., kind: _Optional[_Union[TensorKind, str]] = ..., group: _Optional[int] = ..., aliases: _Optional[_Iterable[str]] = ..., persistent: bool = ...) -> None: ...

class Hyper(_message.Message):
    __slots__ = ("name", "number", "flag", "numbers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: float
    flag: bool
    numbers: Numbers
    def __init__(self, name: _Optional[str] = ..., number: _Optional[float] = ..., flag: bool = ..., numbers: _Optional[_Union[Numbers, _Mapping]] = ...) -> None: ...

class Numbers(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class GroupHypers(_message.Message):
    __slots__ = ("hypers",)
    HYPERS_FIELD_NUMBER: _ClassVar[int]
    hypers: _containers.RepeatedCompositeFieldContainer[Hyper]
    def __init__(self, hypers: _Optional[_Iterable[_Union[Hyper, _Mapping]]] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("name", "groups", "names")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupHypers]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupHypers, _Mapping]]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("tensors", "optimizer", "chunk_bytes", "shares")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    optimizer: OptimizerSpec
    chunk_bytes: int
    shares: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., chunk_bytes: _Optional[int] = ..., shares: _Optional[_Iterable[int]] = ...) -> None: ...

class DataSpec(_message.Message):
    __slots__ = ("samples", "slice_size", "drop_last", "shuffle", "batches", "slices_per_step", "drawn", "turns")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SLICE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DROP_LAST_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SLICES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    samples: int
    slice_size: int
    drop_last: bool
    shuffle: bool
    batches: int
    slices_per_step: int
    drawn: bool
    turns: int
    def __init__(self, samples: _Optional[int] = ..., slice_size: _Optional[int] = ..., drop_last: bool = ..., shuffle: bool = ..., batches: _Optional[int] = ..., slices_per_step: _Optional[int] = ..., drawn: bool = ..., turns: _Optional[int] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("index", "address", "server")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    server: str
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., server: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("member", "rank", "name")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    member: int
    rank: int
    name: str
    def __init__(self, member: _Optional[int] = ..., rank: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class SyncOrigin(_message.Message):
    __slots__ = ("base_version", "epoch", "remaining", "partial")
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    base_version: int
    epoch: int
    remaining: _containers.RepeatedCompositeFieldContainer[Range]
    partial: bool
    def __init__(self, base_version: _Optional[int] = ..., epoch: _Optional[int] = ..., remaining: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., partial: bool = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class SliceRef(_message.Message):
    __slots__ = ("epoch", "index", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    index: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., index: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("careful", "poisoned", "generation", "timeline", "state", "workers", "shards", "consistency", "sync_origin", "slices_per_step", "initialiser", "grant", "reason", "term", "draining", "released", "checkpoints", "stalled", "async_from", "schedule_mode", "beginning", "launched", "loading", "placement", "restarting", "shard_count", "carried_from", "main")
    CAREFUL_FIELD_NUMBER: _ClassVar[int]
    POISONED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    SYNC_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SLICES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    INITIALISER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    ASYNC_FROM_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_MODE_FIELD_NUMBER: _ClassVar[int]
    BEGINNING_FIELD_NUMBER: _ClassVar[int]
    LAUNCHED_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    RESTARTING_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FROM_FIELD_NUMBER: _ClassVar[int]
    MAIN_FIELD_NUMBER: _ClassVar[int]
    careful: bool
    poisoned: _containers.RepeatedCompositeFieldContainer[SliceRef]
    generation: int
    timeline: int
    state: JobState
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    shards: _containers.RepeatedCompositeFieldContainer[ShardInfo]
    consistency: Consistency
    sync_origin: SyncOrigin
    slices_per_step: int
    initialiser: int
    grant: int
    reason: str
    term: int
    draining: _containers.RepeatedScalarFieldContainer[int]
    released: bool
    checkpoints: bool
    stalled: _containers.RepeatedScalarFieldContainer[int]
    async_from: int
    schedule_mode: Mode
    beginning: int
    launched: bool
    loading: bool
    placement: int
    restarting: _containers.RepeatedScalarFieldContainer[int]
    shard_count: int
    carried_from: int
    main: int
    def __init__(self, careful: bool = ..., poisoned: _Optional[_Iterable[_Union[SliceRef, _Mapping]]] = ..., generation: _Optional[int] = ..., timeline: _Optional[int] = ..., state: _Optional[_Union[JobState, str]] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[ShardInfo, _Mapping]]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., sync_origin: _Optional[_Union[SyncOrigin, _Mapping]] = ..., slices_per_step: _Optional[int] = ..., initialiser: _Optional[int] = ..., grant: _Optional[int] = ..., reason: _Optional[str] = ..., term: _Optional[int] = ..., draining: _Optional[_Iterable[int]] = ..., released: bool = ..., checkpoints: bool = ..., stalled: _Optional[_Iterable[int]] = ..., async_from: _Optional[int] = ..., schedule_mode: _Optional[_Union[Mode, str]] = ..., beginning: _Optional[int] = ..., launched: bool = ..., loading: bool = ..., placement: _Optional[int] = ..., restarting: _Optional[_Iterable[int]] = ..., shard_count: _Optional[int] = ..., carried_from: _Optional[int] = ..., main: _Optional[int] = ...) -> None: ...
