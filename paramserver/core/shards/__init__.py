"""The state machine of one shard, and its parts: pulls, pushes, published versions, a change of the setting."""
