"""A server: holds shards of the model and their optimizer state, and counts contributions."""
