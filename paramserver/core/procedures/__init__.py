"""Procedures of several messages of the coordinator: going back, moving shards, changes, checkpoints."""
