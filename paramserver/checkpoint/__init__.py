"""Checkpoints as files: where they lie, how they are written and read, which are good, and which may go."""
