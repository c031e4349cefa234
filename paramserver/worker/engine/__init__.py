"""The parts of a worker that act for the script, and `engine`, which holds all parts. For the script's objects."""

from paramserver.worker.engine.engine import Engine
from paramserver.worker.job.shards import Connect

__all__ = ["Connect", "Engine"]
