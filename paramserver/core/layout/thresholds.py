"""Sizes from which on the work of a step is overlapped, and threads of a server.

The simulation uses the same numbers as the processes.
"""

from __future__ import annotations

# A model with fewer bytes of gradients is pushed when the backward pass is over, not during it.
EARLY_PUSH_BYTES = 4 << 20
# A shard with fewer bytes of weights is not drafted: to send it takes no longer than a call or two.
DRAFT_BYTES = 1 << 20
# If a server still owes fewer bytes of a version, the script waits for them before it begins the forward pass.
REST_BYTES = 1 << 20
# No memory bus can feed more threads of arithmetic.
_MOST_THREADS = 8


def server_threads(cores: float, servers: int) -> int:
    """How many threads each of the ``servers`` on a machine with so many cores has use for, at least 1."""
    return max(1, min(_MOST_THREADS, int(cores) // max(1, servers)))
