"""A shard in files: written beside the training, read when a job goes on, taken over from a script."""
