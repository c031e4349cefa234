"""Where the bytes lie: the flat layout, its chunks, which shard owns which, places in shared memory."""
