"""What a training script has of the cluster, a file for each idea; `loop` joins them."""

from paramserver.worker.engine.host import Connect
from paramserver.worker.engine.loop import Engine

__all__ = ["Connect", "Engine"]
