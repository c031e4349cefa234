"""What the API says of a small job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paramserver.core.blame.spent import PHASES
from paramserver.v1 import coordinator_pb2
from paramserver.web import models
from paramserver.web.facts import ledger_of, status_of


def answers(name: str, changes: Mapping[str, Any] | None = None) -> dict[str, str]:
    """By path, JSON of a job in which everything that has a name is called ``name``. ``changes``: of the status."""
    response = coordinator_pb2.StatusResponse(job="digits", term=1)
    response.processes.add(role="worker", name=name, state="training")
    worker = response.processes.add(role="worker", name="worker-0", state="training")
    for phase in PHASES:
        setattr(worker.phases, f"{phase}_s", 1.0)
    response.processes.add(role="worker", name="worker-1", state="failed")
    response.processes.add(role="server", name="server-0", state="joining")
    status = status_of(response).model_copy(update=dict(changes or {}))
    joined = models.Event(at_s=1.0, kind="joined", subject=name, text=f"{name} has joined", version=3)
    found: dict[str, models.Model] = {
        "/session": models.Session(reads=True, commands=False),
        "/series": models.Series(at_s=[1.0], version=[3], samples_per_s=[4.0], values={name: [0.5]}),
        "/settings": models.Settings(settings=[]),
        "/ledger": ledger_of(coordinator_pb2.AccountsResponse()),
        "/stream": models.Update(status=status, at_s=2.0, events=[joined]),
    }
    return {path: answer.model_dump_json() for path, answer in found.items()}
