"""Which role may send which field of a request, and how large its numbers may be: one table for check and docs.

Each message has a text with all its fields. A field is a word:

    name            whoever may call the method may send it; a number is at most `MAX_COUNT`
    name=own        the caller's own number as a member
    name@role,role  these alone may send it
    name:rising     a number that a coordinator raises one by one: at most `MAX_CLAIM` in messages of others
    name:any        any number: it was chosen at random, or it only describes

Texts and lists are bounded by the size of the message, and by checks of their own (`wire.bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from paramserver.errors import ProtocolError
from paramserver.transport.base import METHODS, Method
from paramserver.transport.security.policy import CALLERS, COORDINATOR
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2

# What counts one by one never comes so far, and sums of such numbers fit into a message.
MAX_COUNT = 1 << 48
# So far are terms, generations and the like believed if others say them: a coordinator goes on counting from there.
MAX_CLAIM = 1 << 40
# A coordinator that has lost its store takes terms and generations up to this over from servers (:func:`taken_over`).
MAX_TAKEN_OVER = 1 << 32
# Parts of a list whose numbers are looked at one by one.
MAX_PARTS = 200_000
OWN, RISING, ANY = "own", "rising", "any"

# The header with which an upload begins, as a field of FrameHeader.
HEADERS: Mapping[str, str] = {
    "Shard.Push": "push",
    "Shard.Initialize": "initialize",
    "Shard.Forward": "forward",
    "Shard.ForwardPart": "forward",
    "Shard.CatchUp": "catch_up",
    "Shard.CatchUpPart": "catch_up",
}
# Models are checked by arithmetic before anything is laid out (`wire.messages`), and cost too much to look at twice.
_UNSEEN = frozenset({"ModelSpec"})

FIELDS: Mapping[str, str] = {
    "ConfigureRequest": (
        "job generation:rising timeline:rising shard shards model layout_digest consistency workers peers "
        "term:rising checkpoints checkpoint_every:any anew record keep version backup filling incarnation:any"
    ),
    "ModelSpec": "tensors optimizer chunk_bytes shares",
    "TensorSpec": "name shape dtype kind group aliases persistent",
    "OptimizerSpec": "name groups names",
    "GroupHypers": "hypers",
    "Hyper": "name number flag numbers",
    "Numbers": "values",
    "Consistency": "revision:rising mode staleness:any from_version",
    "WorkerInfo": "member rank name",
    "ShardInfo": "index address server",
    "Filling": "sources timeline:rising version ahead placement:rising address repair_mbps",
    "InitializeHeader": "job timeline:rising grant worker=own chunks states keep_weights keep_states",
    "ActivateRequest": "job generation:rising timeline:rising grant term:rising",
    "SetMembersRequest": "job generation:rising timeline:rising workers term:rising record plan settled",
    "SetConsistencyRequest": "job generation:rising timeline:rising consistency phase term:rising",
    "PushHeader": (
        "job timeline:rising worker=own sync async samples overflow base_version clock used groups chunks "
        "clip_norm nonce:any shared advances"
    ),
    "SyncName": "step lo hi of",
    "AsyncName": "epoch index",
    "SharedPush": "attachment slot checked",
    "PullRequest": (
        "job timeline:rising worker=own min_version exact_version clock@worker join@worker latest wait_s "
        "include_frozen header_only assignment@worker shared@worker ahead encoding acks@worker"
    ),
    "Assignment": "place workers work_s",
    "SharedPull": "attachment reading",
    "ExchangeRequest": "push pull",
    "IdleRequest": "job timeline:rising worker=own",
    "StealRequest": "job timeline:rising worker=own step of assignment finished",
    "Range": "start stop",
    "ExportRequest": "job timeline:rising min_version wait_s chunks facts",
    "ShareNormsRequest": "job timeline:rising step shard chunks squares",
    "StatsRequest": "job record",
    "CountedRequest": "job timeline:rising",
    "RestoreRequest": "configure manifest grant place",
    "CutRequest": "job timeline:rising term:rising step version missing of number:any slices wait_s",
    "EpochSlices": "epoch slices epochs",
    "ReleaseRequest": "job timeline:rising term:rising versions",
    "ProbePlaceRequest": "job place question answer",
    "LedgerRequest": "job",
    "CopiedRequest": "job timeline:rising version chunks",
    "AttachRequest": "job timeline:rising worker=own layout_digest meeting inbox_bytes host",
    "SetHoldersRequest": (
        "job timeline:rising term:rising placement:rising primary backups peers consistency repair_mbps"
    ),
    "BackupPlace": "address since whole",
    "LendRequest": "job timeline:rising placement:rising layout_digest meeting bytes host",
    "ForwardHeader": (
        "job timeline:rising placement:rising version parts samples overflow used groups chunks clocks min_clock "
        "consistency shared draft ahead feed:any advances"
    ),
    "ContributionRef": "sync async worker nonce:any filler",
    "WorkerClock": "worker clock",
    "SharedForward": "meeting",
    "MadeLentRequest": "job timeline:rising placement:rising version",
    "CatchUpHeader": "job timeline:rising placement:rising version chunks states facts first feed:any",
    "ShardFacts": (
        "applied applied_before duplicate skipped samples ledger consistency counted clocks min_clock advances "
        "ever_used"
    ),
    "LedgerResponse": "first lo hi of worker folded_steps counted names version timeline:rising",
    "FeedRequest": "job timeline:rising plan address feed:any chunks repair_mbps",
    "OpenBulkRequest": "",
    "CollectRequest": (
        "job group rank size ranks channel number piece what reduction dtype bytes data takes wait_s done opens "
        "leaves timeline:rising mine"
    ),
    "JoinRequest": (
        "job role protocol versions pid address index mode staleness:any slices_per_step seed:any "
        "incarnation:any holds@server timeline:rising@server replaces restart_command metrics_url host@worker,observer "
        "beside_worker@server term:rising beginning:any key@server"
    ),
    "SessionRequest": (
        "member=own worker@worker,observer shards@server leaving finished@worker,observer failure@worker,observer "
        "address@server key@server ended@worker,observer not_main@worker,observer"
    ),
    "WorkerReport": (
        "computing version clock epoch samples slices state waiting_for metrics transport epochs_planned at_work "
        "slice_s tally first_metric logged logged_from logging_timeline logging_step steps phases phase phase_s "
        "since untold transport_reason host_tier audited"
    ),
    "SliceRef": "epoch index step",
    "Tally": "timeline:rising handed_in counted late duplicate name lost incarnation:any version unsent",
    "Logged": "step timeline:rising slice samples values",
    "WorkerStep": "step asynchronous phases first",
    "Phases": "data_s compute_s send_s wait_s receive_s other_s gc_s starved_s paused_s",
    "AuditedSlice": "timeline:rising step slice digests",
    "StatsResponse": (
        "version consistency applied duplicate skipped refused bytes_pushed:any bytes_pulled:any max_clock_spread "
        "waiting_for generation:rising timeline:rising clocks shard_bytes missing missing_of term:rising "
        "incarnation:any holds active scheduled committed copies checkpoint_pause_s checkpoint_write_s samples "
        "record model applied_before shard backup whole placement:rising backups times open held staleness"
    ),
    "CopyStatus": "timeline:rising version state reason weights optimizer finite revision:rising",
    "SavedFile": "name bytes sha256",
    "BackupStatus": "place bytes of whole",
    "VersionTimes": (
        "step first_s others_s last_s first others last lo hi of update_s forward_s published_s starved_s "
        "paused_s asynchronous timeline:rising"
    ),
    "Hold": "worker by clock seconds",
    "RegisterModelRequest": "member=own model state_digest script",
    "RegisterDataRequest": "member=own data",
    "DataSpec": "samples slice_size drop_last shuffle batches slices_per_step drawn turns",
    "InitializeDoneRequest": "member=own grant",
    "LeaseRequest": "member=own max_epoch:any want done last_epoch wait_s revision:rising holding timeline:rising",
    "ChangeConsistencyRequest": "mode staleness:any wait_s",
    "StatusRequest": "model events report since_s",
    "SettingsRequest": "newcomer:any",
    "ProbeRequest": "address",
    "DrainRequest": "name wait_s restart",
    "AccountsRequest": "slices epoch",
    "FinishRequest": "member=own timeline:rising version epoch",
    "SnapshotRequest": "member=own timeline:rising",
    "BeginRequest": "member=own slice",
    "LoadRequest": "member=own timeline:rising place",
    "LoadPlace": "epoch count digest",
    "AgreeRequest": "member=own mine@worker name awaited timeline:rising",
    "Agreed": "name epoch count:any value version",
    "EvaluateRequest": "member=own timeline:rising epoch count slices done wants wait_s first leaves undone",
    "EvaluatedBatch": "index value",
    "KeepRequest": "member=own timeline:rising version total offset data",
    "KeptRequest": "member=own base offset number",
    "ScaleRequest": "workers wait_s servers",
    "StopRequest": "reason state said",
    "CheckpointRequest": "wait_s",
    "TraceRequest": "number:any steps profiler received wait_s stop",
    "TracePart": "member=own number:any spans clocks dropped steps last pid host clock name index",
    "TraceSpan": "name track begin_ns:any duration_ns:any step flows:any notes",
    "ClockSample": "asked_ns:any answered_ns:any coordinator_ns:any",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for one field. ``roles``: those that may send it; None: all that may call the method."""

    name: str
    kind: str = ""
    roles: frozenset[str] | None = None


def rules(message: str) -> list[Rule]:
    """The rules for the fields of a message."""
    found = []
    for word in FIELDS[message].split():
        rest, _, roles = word.partition("@")
        if rest.endswith("=own"):
            found.append(Rule(rest.removesuffix("=own"), OWN))
            continue
        name, _, kind = rest.partition(":")
        found.append(Rule(name, kind, frozenset(roles.split(",")) if roles else None))
    return found


def request_of(method: Method) -> Descriptor:
    """What a caller says in a call: the request, or the header of an upload."""
    if method.name not in HEADERS:
        return cast(Descriptor, method.request.DESCRIPTOR)
    header = shard_pb2.FrameHeader.DESCRIPTOR.fields_by_name[HEADERS[method.name]]
    assert header.message_type is not None
    return cast(Descriptor, header.message_type)


def parts_of(message: Descriptor) -> list[tuple[FieldDescriptor, Descriptor]]:
    """The fields of a message that are messages, without maps."""
    return [
        (field, field.message_type)
        for field in message.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    ]


# ---- who


def own_numbers(message: Any) -> set[int]:
    """The numbers in a request that have to be the caller's own."""
    name = message.DESCRIPTOR.name
    if name == "ExchangeRequest":
        return {getattr(message, half).worker for half in ("push", "pull") if message.HasField(half)}
    return {getattr(message, field) for field in _own(name)}


@cache
def _own(message: str) -> tuple[str, ...]:
    return tuple(rule.name for rule in rules(message) if rule.kind == OWN)


@cache
def reserved(message: str, role: str) -> tuple[str, ...]:
    """The fields of a request that a caller of this role may not send."""
    return tuple(rule.name for rule in rules(message) if rule.roles is not None and role not in rule.roles)


def has(message: Any, name: str) -> bool:
    """Whether a field is set."""
    field = message.DESCRIPTOR.fields_by_name[name]
    return bool(message.HasField(name) if field.has_presence else getattr(message, name))


# ---- how large

Check = Callable[[Any], None]


def check_numbers(message: Message, trusted: bool = False) -> None:
    """Raise ProtocolError for a number beyond its bound. ``trusted``: a coordinator says it."""
    _numbers(message.DESCRIPTOR, trusted)(message)


@cache
def _numbers(message: Descriptor, trusted: bool) -> Check:
    """A function that checks one kind of message; made once for each."""
    kinds = {rule.name: rule.kind for rule in rules(message.name)}
    single: list[tuple[str, int]] = []
    several: list[tuple[str, int]] = []
    for field in message.fields:
        if field.type != FieldDescriptor.TYPE_UINT64 or kinds[field.name] == ANY:
            continue
        most = MAX_CLAIM if kinds[field.name] == RISING and not trusted else MAX_COUNT
        (several if field.is_repeated else single).append((field.name, most))
    inner = [
        (field.name, field.is_repeated, _numbers(part, trusted))
        for field, part in parts_of(message)
        if part.name not in _UNSEEN and _counts(part)
    ]

    def check(value: Any) -> None:
        for name, most in single:
            if getattr(value, name) > most:
                raise beyond(message.name, name, getattr(value, name), most)
        for name, most in several:
            if (largest := max(getattr(value, name), default=0)) > most:
                raise beyond(message.name, name, largest, most)
        for name, repeated, part in inner:
            if repeated:
                _each(message.name, name, getattr(value, name), part)
            elif value.HasField(name):
                part(getattr(value, name))

    return check


def _each(message: str, name: str, parts: Sequence[Any], check: Check) -> None:
    if len(parts) > MAX_PARTS:
        raise ProtocolError(f"{message}.{name} has {len(parts)} entries, and {MAX_PARTS} is the most")
    for part in parts:
        check(part)


@cache
def _counts(message: Descriptor) -> bool:
    """Whether a message, or a part of it, has numbers with a bound."""
    return message.name not in _UNSEEN and (
        any(field.type == FieldDescriptor.TYPE_UINT64 for field in message.fields)
        or any(_counts(part) for _, part in parts_of(message))
    )


def taken_over(number: int) -> int:
    """The term or the generation that others have told a coordinator, if it may count on from there; otherwise 0.

    From here to `MAX_CLAIM` there are more numbers than a job can use.
    """
    return number if number <= MAX_TAKEN_OVER else 0


def beyond(message: str, name: str, value: int, most: int) -> ProtocolError:
    """The refusal of a number."""
    return ProtocolError(f"{message}.{name} {value} is out of bounds ({most})")


# ---- for people


def senders() -> Mapping[str, frozenset[str]]:
    """By message, the roles that may send it in some request."""
    found: dict[str, set[str]] = {}

    def walk(message: Descriptor, roles: frozenset[str]) -> None:
        known = found.setdefault(message.name, set())
        if roles <= known:
            return
        known |= roles
        allowed = {rule.name: rule.roles for rule in rules(message.name)}
        for field, part in parts_of(message):
            own = allowed[field.name]
            walk(part, roles if own is None else own)

    for method in METHODS.values():
        walk(request_of(method), CALLERS[method.name])
    return {message: frozenset(roles) for message, roles in found.items()}


def table() -> list[tuple[str, str, str, str, str]]:
    """Rows of (message, fields, who may send them, bound, otherwise): fields of one kind share a row."""
    rows = []
    for message, roles in sorted(senders().items()):
        groups: dict[tuple[str, str, str], list[str]] = {}
        for rule in rules(message):
            who = ", ".join(sorted(rule.roles if rule.roles is not None else roles))
            groups.setdefault((who, *_bound(message, rule, roles)), []).append(rule.name)
        rows += [(message, ", ".join(names), *how) for how, names in groups.items()]
    return rows


def _bound(message: str, rule: Rule, roles: frozenset[str]) -> tuple[str, str]:
    """The bound of a field, and what happens otherwise, in words."""
    if rule.kind == OWN:
        return "the number of the caller", "denied"
    denied = ["denied"] if rule.roles is not None else []
    field = _descriptor(message).fields_by_name[rule.name]
    if field.type != FieldDescriptor.TYPE_UINT64 or rule.kind == ANY or message in _UNSEEN:
        return "", ", ".join(denied)
    return "2^48" if rule.kind != RISING or roles == {COORDINATOR} else "2^40", ", ".join([*denied, "out of bounds"])


@cache
def _descriptor(message: str) -> Descriptor:
    for file in (coordinator_pb2, shard_pb2, types_pb2):
        if message in file.DESCRIPTOR.message_types_by_name:
            found: Descriptor = file.DESCRIPTOR.message_types_by_name[message]
            return found
    raise AssertionError(f"there is no message {message}")


def page() -> str:
    """The table as docs/security.md shows it."""
    head = ["| message | fields | who may send them | at most | otherwise |", "|---|---|---|---|---|"]
    return "\n".join(
        [
            *head,
            *(
                f"| `{row[0]}` | {row[1].replace('_', chr(92) + '_')} | {' | '.join(row[2:])} |"
                for row in table()
                if row[1]
            ),
        ]
    )
