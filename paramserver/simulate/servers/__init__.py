"""Simulated servers: shards at their primaries and backups, and the placement of shards. For the simulation only."""
