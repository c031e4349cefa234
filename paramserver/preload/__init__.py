"""A process that has imported torch, and of which others are forked. Imports processes. Used by launch and roles."""
