"""The private certificate authority of a cluster, and the settings about security.

Used by roles, launch, machine, doctor and cli.
"""
