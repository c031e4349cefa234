"""``paramserver set``: change the consistency of a running job, at a version boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from paramserver.cli.common import merge_overrides, parse_assignments, shows, tell
from paramserver.cli.look.facts import describe
from paramserver.cli.target import NEAR, Where, find_target
from paramserver.config import ENV_CONFIG, FIELDS, load_settings
from paramserver.errors import ConfigError

if TYPE_CHECKING:
    from paramserver.v1.coordinator_pb2 import ChangeConsistencyRequest

WAIT_S = 60.0
CHANGEABLE = ("consistency.mode", "consistency.staleness")


def set_(
    *assignments: str,
    staleness: Annotated[str | None, shows("INT|unbounded", leading_hyphen=True)] = None,
    where: Where = NEAR,
) -> int:
    """Change the consistency of a running job, as in: paramserver set consistency.mode=async --staleness 4

    Parameters
    ----------
    assignments
        consistency.mode=sync, consistency.mode=async, or consistency.staleness=N
    staleness
        Short for consistency.staleness=N.
    """
    changes = merge_overrides({"consistency.staleness": staleness}, parse_assignments(assignments))
    check_changes(changes)
    target = find_target(where)
    current = describe(target.status())
    from paramserver.v1.coordinator_pb2 import ChangeConsistencyResponse
    from paramserver.web.facts import consistency_of

    request = make_request(changes, current["mode"], current["staleness"])
    response = target.call("Coordinator.SetConsistency", request, WAIT_S + 10.0)
    assert isinstance(response, ChangeConsistencyResponse)
    mode, staleness_now = consistency_of(response.consistency)
    bound = "" if staleness_now is None else f", staleness {staleness_now}"
    boundary = response.consistency.from_version
    since = f", from version {boundary} on" if boundary else ", at once"
    tell(f"{current['job']}: mode {mode}{bound}{since}")
    return 0


def check_changes(changes: dict[str, object]) -> None:
    """Raises ConfigError if `changes` is empty, or names or holds what cannot be set while a job runs."""
    if not changes:
        raise ConfigError("nothing to set; write, for example: paramserver set consistency.mode=async --staleness 4")
    for key in changes:
        if key in FIELDS and key not in CHANGEABLE:
            raise ConfigError(f"{key} cannot change while a job runs; {' and '.join(CHANGEABLE)} can")
    load_settings(overrides=changes, environ={ENV_CONFIG: ""})


def make_request(
    changes: dict[str, object], current_mode: str | None, current_staleness: int | str | None
) -> ChangeConsistencyRequest:
    """The request for ``changes``; other settings stay as they are. Raises ConfigError for a contradiction.

    A job that becomes asynchronous gets the default staleness if ``changes`` does not name one.
    """
    from paramserver.v1.coordinator_pb2 import ChangeConsistencyRequest
    from paramserver.v1.types_pb2 import MODE_ASYNC, MODE_SYNC

    kept = {"consistency.mode": current_mode, "consistency.staleness": current_staleness}
    wish = load_settings(overrides={**kept, **changes}, environ={ENV_CONFIG: ""}).consistency
    if wish.mode == "sync":
        if "consistency.staleness" in changes:
            raise ConfigError("consistency.staleness has no meaning with consistency.mode=sync; set one or the other")
        return ChangeConsistencyRequest(mode=MODE_SYNC, wait_s=WAIT_S)
    request = ChangeConsistencyRequest(mode=MODE_ASYNC, wait_s=WAIT_S)
    if wish.staleness != "unbounded":
        request.staleness = wish.staleness
    return request
