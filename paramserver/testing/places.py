"""The places in the code where a planned fault may strike (`paramserver.failpoints.reach`), with the roles there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One place in the code. ``role``: the processes that reach the place. ``steps``: whether the place names its step.

    ``error``: the meaning of an error at the place. ``when``: the state of the process at the place, for the page.
    ``replicas``: only shards with backups reach the place.
    """

    role: str
    when: str
    steps: bool = True
    # "": no errors at this place, since no caller would ask again.
    error: str = ""
    replicas: bool = False


_ASKED_AGAIN = "the caller asks again"
_STORAGE = "the storage fails (EIO)"

# In asynchronous mode a step is the version that the contribution was computed on.
PLACES: Mapping[str, Place] = {
    "push.recv": Place("server", "the head of a push is received", error=_ASKED_AGAIN),
    "push.after_stage": Place("server", "a push has arrived; it is not counted yet"),
    "step.before_decide": Place("server", "a contribution is about to be counted, which may complete its step"),
    "step.after_decide": Place("server", "all slices of the step are there"),
    "apply.mid": Place("server", "a chunk is about to be updated; the k-th one with nth = k"),
    # torch updates weights and optimizer state of a chunk in one call, so there is no place between them.
    "apply.after_weights_before_opt": Place("server", "weights and state of one chunk are new, nothing is published"),
    "commit.before_log": Place("server", "the next version is about to be published"),
    "commit.after_log_before_reply": Place("server", "the next version is published, and no worker has been told"),
    "forward.before": Place("server", "a primary is about to send a version to its backups", replicas=True),
    "forward.received": Place("server", "a backup has received a version, and not answered", replicas=True),
    "forward.before_ack": Place("server", "a primary is about to wait for its backups", replicas=True),
    "forward.after_ack": Place("server", "all backups have answered, nothing is published", replicas=True),
    "promote.before": Place("server", "a backup is about to become the primary", replicas=True),
    "promote.after": Place("server", "a backup has become the primary", replicas=True),
    "catch_up.received": Place("server", "a new backup has received some chunks of its shard", replicas=True),
    "catch_up.after_chunks": Place("server", "a primary has sent a new backup some chunks", replicas=True),
    "reply.drop": Place("server", "a contribution is counted, the answer not sent", error=_ASKED_AGAIN),
    "ckpt.tmp_open": Place("server", "the temporary file is open", error=_STORAGE),
    "ckpt.mid_write": Place("server", "a part of the file is written", error=_STORAGE),
    "ckpt.before_fsync": Place("server", "the whole file is written", error=_STORAGE),
    "ckpt.before_rename": Place("server", "the file is on the disk under its temporary name", error=_STORAGE),
    "ckpt.before_dirsync": Place("server", "the file has its final name", error=_STORAGE),
    "ckpt.shard_done": Place("server", "one server's part is done"),
    "ckpt.manifest": Place("coordinator", "all parts are done, the manifest is about to be written", error=_STORAGE),
    "ckpt.pointer": Place("coordinator", "the manifest is written, the pointer not", error=_STORAGE),
    "ckpt.gc": Place("coordinator", "old checkpoints are about to be removed", error=_STORAGE),
    "coord.before_generation": Place("coordinator", "a new membership is about to be told", steps=False),
    "coord.after_generation": Place("coordinator", "a new membership has been told", steps=False),
    "coord.before_promotion": Place(
        "coordinator", "a server is gone, backups are about to take its place", steps=False, replicas=True
    ),
    "coord.before_timeline": Place("coordinator", "the job is about to go back to a checkpoint", steps=False),
    "coord.after_timeline": Place("coordinator", "the job has gone back to a checkpoint", steps=False),
    "restore.before_load": Place("server", "a server is about to read its part of a checkpoint", steps=False),
    "restore.after_load": Place("server", "a server's part is read, and not published", steps=False),
    "slice.leased": Place("coordinator", "slices are leased, the worker has not heard", False, _ASKED_AGAIN),
    "slice.before_done": Place("coordinator", "finished slices are about to be noted", False, _ASKED_AGAIN),
    "redis.before_script": Place("coordinator", "a script is about to run in the store", steps=False),
    "redis.after_script": Place("coordinator", "a script has run in the store", steps=False),
    "worker.after_pull": Place("worker", "a new version has been taken in"),
    "worker.after_grad": Place("worker", "a gradient is computed, nothing of it sent"),
    "worker.between_shards": Place("worker", "one shard has a contribution, the next one has not"),
}
