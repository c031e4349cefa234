"""A member of a job: how it joins, reports, hears of changes and leaves.

Imports transport and wire. Used by every role.
"""
