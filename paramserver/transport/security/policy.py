"""Which role may call which method: the one table that the server's check and its tests read."""

from __future__ import annotations

from collections.abc import Mapping

COORDINATOR = "coordinator"
SERVER = "server"
WORKER = "worker"
ADMIN = "admin"

# Callers that have no certificate of their own: members that only read, and whoever shows nothing but the join token.
OBSERVER = "observer"
GUEST = "guest"

ROLES = frozenset({COORDINATOR, SERVER, WORKER, ADMIN})
# The roles of a caller without a certificate; an admin shows the admin token.
ANYBODY = ROLES - {ADMIN}

_MEMBERS = frozenset({SERVER, WORKER})

# Method to the roles that may call it; methods as in transport.base.METHODS.
CALLERS: Mapping[str, frozenset[str]] = {
    "Coordinator.Join": _MEMBERS | {ADMIN},  # an admin joins as an observer
    "Coordinator.Session": _MEMBERS | {ADMIN},
    "Coordinator.RegisterModel": frozenset({WORKER}),
    "Coordinator.RegisterData": frozenset({WORKER}),
    "Coordinator.InitializeDone": frozenset({WORKER}),
    "Coordinator.Lease": frozenset({WORKER}),
    "Coordinator.SetConsistency": frozenset({ADMIN}),
    "Coordinator.Status": ROLES,
    "Coordinator.Settings": ROLES,
    "Coordinator.Probe": ROLES,
    "Coordinator.Drain": frozenset({ADMIN}),
    "Coordinator.Ledger": ROLES,
    "Coordinator.Finish": frozenset({WORKER}),
    "Coordinator.Begin": frozenset({WORKER}),
    "Coordinator.Load": frozenset({WORKER}),
    "Coordinator.Agree": frozenset({WORKER}),
    "Coordinator.Evaluate": frozenset({WORKER}),
    "Coordinator.Keep": frozenset({WORKER}),
    "Coordinator.Kept": frozenset({WORKER}),
    "Coordinator.Snapshot": frozenset({WORKER, ADMIN}),
    "Coordinator.Scale": frozenset({ADMIN}),
    "Coordinator.Checkpoint": frozenset({ADMIN}),
    "Coordinator.Stop": frozenset({ADMIN}),
    "Coordinator.Trace": frozenset({ADMIN}),
    "Coordinator.HandIn": _MEMBERS,
    "Shard.Configure": frozenset({COORDINATOR}),
    "Shard.Initialize": frozenset({WORKER}),
    "Shard.Activate": frozenset({COORDINATOR}),
    "Shard.SetMembers": frozenset({COORDINATOR}),
    "Shard.SetConsistency": frozenset({COORDINATOR}),
    "Shard.Push": frozenset({WORKER}),
    "Shard.Pull": frozenset({WORKER, COORDINATOR, ADMIN}),
    "Shard.Exchange": frozenset({WORKER}),
    "Shard.Idle": frozenset({WORKER, COORDINATOR}),  # the coordinator: for a worker that gets nowhere
    "Shard.Steal": frozenset({WORKER}),
    "Shard.Export": frozenset({WORKER, SERVER, COORDINATOR, ADMIN}),  # a server: fills a shard of a new plan
    "Shard.ShareNorms": frozenset({SERVER}),
    "Shard.Stats": frozenset({COORDINATOR, SERVER, ADMIN}),  # a server's health check bears the server's certificate
    "Shard.Counted": frozenset({COORDINATOR}),
    "Shard.Ledger": frozenset({COORDINATOR}),
    "Shard.Restore": frozenset({COORDINATOR}),
    "Shard.Cut": frozenset({COORDINATOR}),
    "Shard.Release": frozenset({COORDINATOR}),
    "Shard.ProbePlace": frozenset({COORDINATOR}),
    "Shard.Copied": frozenset({SERVER}),
    "Shard.Attach": frozenset({WORKER}),
    "Shard.SetHolders": frozenset({COORDINATOR}),
    "Shard.Lend": frozenset({SERVER}),
    "Shard.Forward": frozenset({SERVER}),
    "Shard.ForwardLent": frozenset({SERVER}),
    "Shard.MadeLent": frozenset({SERVER}),
    "Shard.CatchUp": frozenset({SERVER}),
    "Shard.Feed": frozenset({SERVER}),
    "Shard.CatchUpPart": frozenset({SERVER}),
    "Shard.ForwardPart": frozenset({SERVER}),
    "Shard.Collect": frozenset({WORKER}),
    "Shard.OpenBulk": ROLES,  # each call over the connection is checked again
}

# Methods whose caller need not be a member. All others are for members, for the coordinator, or for admins (`members`).
GUEST_METHODS = frozenset(
    {
        *("Coordinator.Join", "Coordinator.Status", "Coordinator.Settings", "Coordinator.Probe", "Coordinator.Ledger"),
        *("Shard.Stats", "Shard.Pull", "Shard.Export", "Shard.OpenBulk"),
        "Shard.Collect",  # ranks of a process group are no members
    }
)

# Methods that observers may call, beside those for guests. They name their model and learn that of the job.
OBSERVER_METHODS = GUEST_METHODS | {
    *("Coordinator.Session", "Coordinator.Snapshot", "Coordinator.RegisterModel"),
    *("Coordinator.RegisterData", "Coordinator.Agree", "Coordinator.Kept"),
}

# Methods that take the admin token in addition.
ADMIN_METHODS = frozenset(method for method, callers in CALLERS.items() if callers == {ADMIN})
