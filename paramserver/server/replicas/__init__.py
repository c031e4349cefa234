"""Copies of a shard on other servers: what a primary sends to its backups, and what a backup does with it."""
