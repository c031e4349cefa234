"""Facts about this machine: the jobs and roles that run here, its addresses, a private store.

Used by launch, roles, doctor and cli.
"""
