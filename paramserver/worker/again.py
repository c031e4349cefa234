"""A process is a worker of a job once: what a second ``ps.init`` in it is refused with."""

from __future__ import annotations

from collections.abc import Sequence

from paramserver import errors
from paramserver.worker.context import Context
from paramserver.worker.engine import Engine


def check_before(contexts: Sequence[Context], launched: bool) -> None:
    """Raises UserError if a context is open, or if this process was ``launched`` for a job that it has left.

    ``contexts``: those of this process so far.
    """
    if any(not context.closed for context in contexts):
        raise errors.UserError(
            "ps.init() was called before in this process, which would be two workers whose steps wait for each other: "
            "use the context that it returned, or close that first"
        )
    if contexts and launched:
        raise _left()


def check_after(contexts: Sequence[Context], engine: Engine) -> None:
    """Raises UserError, and leaves, if the job that ``engine`` has joined is one that this process has left before."""
    beginning = engine.member.session.view.beginning
    if any(context.engine.member.session.view.beginning == beginning for context in contexts):
        engine.close()
        raise _left()


def _left() -> errors.UserError:
    return errors.UserError(
        "ps.init() was called again after ctx.close(): a job is one training, and this worker has left it, so a second "
        "model would not be trained. Begin a job for each training, with paramserver run in a loop (see "
        "docs/training.md, One training after another)"
    )
