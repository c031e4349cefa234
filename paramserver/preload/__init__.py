"""A process that has imported everything, and of which others are forked. Imports processes only. Used by launch, roles."""
