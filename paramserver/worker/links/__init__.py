"""The shards of a job, as a worker sees them: pushing and pulling with retries, back-off and a deadline."""

from paramserver.worker.links.cuts import Cuts
from paramserver.worker.links.pushes import Pushing
from paramserver.worker.links.states import States


class ShardLinks(Pushing, Cuts, States):
    """All of them at once."""


__all__ = ["ShardLinks"]
