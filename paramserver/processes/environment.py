"""Variables by which a launcher tells its children their part. No other process sets them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

ENV_STORE = "PARAMSERVER_INTERNAL_STORE"
ENV_STORE_NAME = "PARAMSERVER_INTERNAL_STORE_NAME"
ENV_READY_FD = "PARAMSERVER_INTERNAL_READY_FD"
# The launcher's wish for the index of a server, or the rank of a worker.
ENV_INDEX = "PARAMSERVER_INTERNAL_INDEX"
# The wish of `start auto` for the same, and the number of its task on its node.
ENV_WISH = "PARAMSERVER_INTERNAL_WISH"
ENV_LOCAL = "PARAMSERVER_INTERNAL_LOCAL"
# Of a DDP script: the port at which its ranks meet, and their number, with a space between.
ENV_RANKS = "PARAMSERVER_INTERNAL_RANKS"
# Set in a worker whose launcher has a terminal as standard input.
ENV_TERMINAL = "PARAMSERVER_INTERNAL_TERMINAL"
# Pids of the ended processes that had this seat before, with commas between.
ENV_REPLACES = "PARAMSERVER_INTERNAL_REPLACES"
# The name under which a coordinator leads in the store, and the name of its ended predecessor.
ENV_LEADER = "PARAMSERVER_INTERNAL_LEADER"
ENV_FORMER = "PARAMSERVER_INTERNAL_FORMER"
# The launcher keeps the place of checkpoints: the job's histories (JSON); whether the job begins anew, even if it is in
# the store; whether the place is the launcher's own.
ENV_HISTORIES = "PARAMSERVER_INTERNAL_HISTORIES"
ENV_FRESH = "PARAMSERVER_INTERNAL_FRESH"
ENV_PRIVATE = "PARAMSERVER_INTERNAL_PRIVATE"
# Where the launcher has its settings from: a JSON object by dotted name.
ENV_ORIGINS = "PARAMSERVER_INTERNAL_ORIGINS"
# Set in a process that a supervising `paramserver start` has started: the process plays one part, and starts no others.
ENV_PART = "PARAMSERVER_INTERNAL_PART"
# With this exit code a server tells its supervising process that the job has failed, so that another one is of no use.
# People are shown the exit code 1.
JOB_FAILED_CODE = 79


def is_part() -> bool:
    """Whether a supervising `paramserver start` has started this process."""
    return ENV_PART in os.environ


def replacing(pids: Sequence[int]) -> dict[str, str]:
    """The variables of a process that is started in place of the ended ones with these pids."""
    return {ENV_REPLACES: ",".join(map(str, pids))} if pids else {}


def told_origins() -> dict[str, str]:
    """Where the launcher has its settings from, by dotted name; empty in a process that no launcher has started."""
    origins: dict[str, str] = json.loads(os.environ.get(ENV_ORIGINS, "{}"))
    return origins


def replaced_pids() -> list[int]:
    """The pids of the ended processes in whose place this one was started."""
    return [int(word) for word in os.environ.get(ENV_REPLACES, "").split(",") if word]
