"""How contributions become versions: names, the reduction tree, the two modes, the state machine of a shard."""
