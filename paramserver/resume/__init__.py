"""Jobs that go on: from a directory of checkpoints with an owner, or from records of the store or the servers.

Used by roles, launch and cli.
"""
