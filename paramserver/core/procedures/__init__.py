"""What takes a coordinator several messages, as state machines: going back, moving shards, changes, checkpoints."""
