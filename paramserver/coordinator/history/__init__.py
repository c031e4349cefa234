"""Checkpoints of a job, going back to them, and loading others in the middle of a run."""
