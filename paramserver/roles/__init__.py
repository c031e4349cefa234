"""The processes of every deployment: coordinator, server and worker, as children of `run` or by `paramserver start`.

Used by the API, launch and cli.
"""
