"""Random numbers in a forked process: as different from those of others as if the process had begun by itself."""

from __future__ import annotations

import os
import random
import sys


def draw_anew() -> None:
    """Give this process random states of its own, for libraries that draw theirs when they are imported.

    Python's hash seed cannot be changed: processes that are forked of the same process share it.
    """
    random.seed()
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import process

        process.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
