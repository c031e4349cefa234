"""The private certificate authority of a cluster, and what the settings say about security.

Used by roles, launch, machine, doctor and cli.
"""
