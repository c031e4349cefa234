"""Which slice comes next, and when this worker may go on: one class per mode, with the same methods.

Their methods block: the training loop calls them, and the network runs in the background.
"""

from paramserver.worker.pace.asynchronous import AsyncPace
from paramserver.worker.pace.item import Item
from paramserver.worker.pace.paces import Pace, Paces
from paramserver.worker.pace.sync import SyncPace

__all__ = ["AsyncPace", "Item", "Pace", "Paces", "SyncPace"]
