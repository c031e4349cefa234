"""The shards of a job, as a worker sees them: pushing and pulling with retries, back-off and a deadline."""

from paramserver.worker.links.pulls import Pulling
from paramserver.worker.links.pushes import Pushing
from paramserver.worker.links.states import States


class ShardLinks(Pushing, Pulling, States):
    """All of them at once."""


__all__ = ["ShardLinks"]
