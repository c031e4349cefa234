"""Variables by which a launcher tells its children who they are. Nobody else sets them."""

from __future__ import annotations

ENV_STORE = "PARAMSERVER_INTERNAL_STORE"
ENV_STORE_NAME = "PARAMSERVER_INTERNAL_STORE_NAME"
ENV_READY_FD = "PARAMSERVER_INTERNAL_READY_FD"
# The launcher's wish for the index of a server, or the rank of a worker.
ENV_INDEX = "PARAMSERVER_INTERNAL_INDEX"
# Pid of the process of the launcher's that had this place before, and has ended.
ENV_REPLACES = "PARAMSERVER_INTERNAL_REPLACES"
# Under which name a coordinator leads in the store; and that of the one in whose place it was started.
ENV_LEADER = "PARAMSERVER_INTERNAL_LEADER"
ENV_FORMER = "PARAMSERVER_INTERNAL_FORMER"
# JSON: whose checkpoints are the job's, since the launcher keeps their place; whether that job begins anew, whatever is
# known of it; and whether the place is the launcher's own.
ENV_HISTORIES = "PARAMSERVER_INTERNAL_HISTORIES"
ENV_FRESH = "PARAMSERVER_INTERNAL_FRESH"
ENV_PRIVATE = "PARAMSERVER_INTERNAL_PRIVATE"
# Set in servers that were started beside another process of `paramserver start`.
ENV_COMPANION = "PARAMSERVER_INTERNAL_COMPANION"
