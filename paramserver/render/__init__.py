"""``paramserver render``: files that start a job elsewhere, made from its settings.

Targets only compute the files; `output` writes them.
"""
