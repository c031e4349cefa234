"""What a training script has of the cluster, a file for each part; `engine` holds them. For the script's objects."""

from paramserver.worker.engine.engine import Engine
from paramserver.worker.job.shards import Connect

__all__ = ["Connect", "Engine"]
