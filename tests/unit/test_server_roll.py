"""What a server answers to workers of whom it has not heard."""

from __future__ import annotations

from contextvars import copy_context

import pytest

from paramserver import errors
from paramserver.transport.base import METHODS, Caller, set_caller
from paramserver.transport.security.members import Known, ServerRoll, judge
from paramserver.transport.security.policy import ANYBODY, WORKER
from paramserver.v1 import shard_pb2

REQUEST = shard_pb2.IdleRequest(worker=7)


@pytest.mark.parametrize(
    ("roll", "kind"),
    [
        # It has begun anew, and hears of the members later: a worker that gives up would end the job.
        (ServerRoll(b"key"), errors.UnavailableError),
        (ServerRoll(b"key", {8: Known(WORKER, b"another")}), errors.UnavailableError),
        (ServerRoll(b"key", {7: Known(WORKER, b"another")}), errors.DeniedError),
    ],
)
def test_a_server_that_has_begun_anew_lets_workers_try_again(roll: ServerRoll, kind: type[Exception]) -> None:
    def ask(roll: ServerRoll) -> None:
        set_caller(Caller(ANYBODY, False, b"proof"))
        judge(METHODS["Shard.Idle"], REQUEST, roll)

    with pytest.raises(kind) as caught:
        copy_context().run(ask, roll)
    assert type(caught.value) is kind
    copy_context().run(ask, ServerRoll(b"key", {7: Known(WORKER, b"proof")}))
