"""Rounds of process groups: which rank has come, and when a result is complete."""
