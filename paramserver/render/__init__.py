"""``paramserver render``: files that start a job elsewhere, made from the settings that run it.

Targets only compute; what they return is written by `output`.
"""
