"""Weights on their way in: what a pull brings, where it goes, and who waits for it."""
