"""A server: holds one shard of the model and the optimizer state, and counts contributions."""
