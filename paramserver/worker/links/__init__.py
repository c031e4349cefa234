"""The shards of a job, as a worker sees them: pushing and pulling with retries, back-off and a deadline."""

from paramserver.worker.links.shards import ShardLinks

__all__ = ["ShardLinks"]
