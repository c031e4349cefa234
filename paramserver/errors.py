"""All errors of paramserver, grouped by what the caller does about them.

ParamServerError
├── UserError (also a ValueError)      mend your configuration, script or data; exit code 2
│   ├── ConfigError
│   ├── DeniedError                    a certificate or token that does not allow this
│   ├── ModelError                     the model or the optimizer
│   └── DataError                      the data set or its loader
├── RetryableError                     try the same again, with back-off
│   ├── UnavailableError               nobody answers there; exit code 3
│   ├── DeadlineError                  waited as long as allowed; exit code 6
│   ├── NotLeaderError                 that coordinator stands by for another one; exit code 3
│   └── OverloadedError                slow down
├── StaleViewError                     refresh the view of the cluster, then go on
│   ├── FencedError                    an older generation or timeline
│   │   ├── NotMemberError             this process is no member any more, or not of this coordinator: join again
│   │   ├── RelievedError              other servers hold the shards of this server: drop them, then join again
│   │   └── RolledBackError            the job went back to an earlier version: go on from there
│   ├── OutOfOrderError                a contribution to a step that is not open yet
│   └── GoneError                      a version that is no longer kept
├── ProtocolError                      a message that is refused; nothing changed
│   └── NonFiniteError                 a NaN or infinite number in it
├── VersionMismatchError               other versions on the two sides; exit code 4
├── StoreError                         the store cannot be reached or used; exit code 3
├── CheckpointError                    a checkpoint cannot be written or read; exit code 1
├── JobFailedError                     the job has ended badly; exit code 1
└── EndedError                         nothing is left to do: the job is done, or this member is drained; exit code 0
    └── RestartError                   this process is to be started again; exit code 75
"""

from __future__ import annotations


class ParamServerError(Exception):
    """Base of all errors that paramserver raises on purpose. The text is one sentence that says what to do."""

    exit_code = 1


class UserError(ParamServerError, ValueError):
    """A mistake in the configuration, the script or the data."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is unknown, malformed, or contradicts another."""


class DeniedError(UserError):
    """The caller's certificate or token does not allow this; the log of the other side gives the reason."""


class ModelError(UserError):
    """The model or the optimizer cannot be trained as it is."""


class DataError(UserError):
    """The data set or its loader cannot be cut into slices."""


class RetryableError(ParamServerError):
    """The same call may succeed later."""


class UnavailableError(RetryableError):
    """The process at that address does not answer."""

    exit_code = 3


class DeadlineError(RetryableError):
    """A wait reached its deadline. The text names who was waited for."""

    exit_code = 6


class NotLeaderError(UnavailableError):
    """That coordinator stands by for another one: ask the next address."""


class OverloadedError(RetryableError):
    """The peer asks to slow down."""


class StaleViewError(ParamServerError):
    """The caller's view of the cluster is out of date."""


class FencedError(StaleViewError):
    """The message belongs to an older generation or timeline."""


class NotMemberError(FencedError):
    """The coordinator does not know this process: join again."""


class RelievedError(FencedError):
    """Other servers have taken over the shards of this server: drop them, then join again."""


class RolledBackError(FencedError):
    """The job went back to a checkpoint, on a new timeline: go on from the version that it has now."""


class OutOfOrderError(StaleViewError):
    """A contribution to a step that this shard has not opened yet."""


class GoneError(StaleViewError):
    """The version asked for is no longer kept."""


class ProtocolError(ParamServerError):
    """A message was refused and changed nothing."""


class NonFiniteError(ProtocolError):
    """A NaN or an infinite number where only finite ones are allowed."""


class VersionMismatchError(ParamServerError):
    """The two sides run versions that do not work together."""

    exit_code = 4


class StoreError(ParamServerError):
    """The store cannot be reached or used."""

    exit_code = 3


class CheckpointError(ParamServerError):
    """A checkpoint cannot be written, or is incomplete or damaged. The text says what and where."""


class JobFailedError(ParamServerError):
    """The job has ended; the text says why."""


class EndedError(ParamServerError):
    """There is nothing left to do here: the job is done or stopped, or this member was asked to leave."""

    exit_code = 0


class RestartError(EndedError):
    """This process was asked to end so that it is started again; the exit code says so to who watches it."""

    exit_code = 75
