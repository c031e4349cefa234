"""What a job goes on from: a directory of checkpoints and its owner, or a job that the store or the servers know.

Used by roles, launch and cli.
"""
