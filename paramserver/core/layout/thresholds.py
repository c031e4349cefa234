"""From which size on the work of a step is overlapped. The simulation uses the same numbers as the processes."""

from __future__ import annotations

# A model with fewer bytes of gradients is pushed when the backward pass is over, not during it.
EARLY_PUSH_BYTES = 4 << 20
# A shard with fewer bytes of weights is not drafted: to send it takes no longer than a call or two.
DRAFT_BYTES = 1 << 20
# If a server still owes fewer bytes of a version, the script waits for them before it begins the forward pass.
REST_BYTES = 1 << 20
