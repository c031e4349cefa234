"""Variables by which a launcher tells its children their part. No other process sets them."""

from __future__ import annotations

ENV_STORE = "PARAMSERVER_INTERNAL_STORE"
ENV_STORE_NAME = "PARAMSERVER_INTERNAL_STORE_NAME"
ENV_READY_FD = "PARAMSERVER_INTERNAL_READY_FD"
# The launcher's wish for the index of a server, or the rank of a worker.
ENV_INDEX = "PARAMSERVER_INTERNAL_INDEX"
# Pid of the ended process that had this seat before.
ENV_REPLACES = "PARAMSERVER_INTERNAL_REPLACES"
# The name under which a coordinator leads in the store, and the name of its ended predecessor.
ENV_LEADER = "PARAMSERVER_INTERNAL_LEADER"
ENV_FORMER = "PARAMSERVER_INTERNAL_FORMER"
# The launcher keeps the place of checkpoints: the job's histories (JSON); whether the job begins anew, even if it is in
# the store; whether the place is the launcher's own.
ENV_HISTORIES = "PARAMSERVER_INTERNAL_HISTORIES"
ENV_FRESH = "PARAMSERVER_INTERNAL_FRESH"
ENV_PRIVATE = "PARAMSERVER_INTERNAL_PRIVATE"
# Set in servers that were started beside another process of `paramserver start`.
ENV_COMPANION = "PARAMSERVER_INTERNAL_COMPANION"
