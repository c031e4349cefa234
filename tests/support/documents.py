"""A small document of the page."""

from __future__ import annotations

from paramserver.v1 import coordinator_pb2
from paramserver.web import models
from paramserver.web.facts import ledger_of, status_of


def document(name: str) -> models.Document:
    """Everything that has a name is called ``name``."""
    response = coordinator_pb2.StatusResponse(job="digits")
    response.processes.add(role="worker", name=name)
    series = models.Series(at_s=[1.0], version=[3], samples_per_s=[4.0], values={name: [0.5]})
    return models.Document(
        status=status_of(response),
        series=series,
        events=[models.Event(at_s=1.0, kind="joined", subject=name, text=f"{name} has joined", version=3)],
        ledger=ledger_of(coordinator_pb2.AccountsResponse()),
        settings=[],
    )
