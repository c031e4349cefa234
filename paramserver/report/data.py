"""Everything that a report shows. The parts are the answers of the API (docs/api.md)."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from paramserver.web.models import Event, Ledger, Model, Setting

FORMAT: Final = "report 1"

Kind = Literal["running", "done", "stopped", "failed", "interrupted"]


class Outcome(Model):
    """How the run ended."""

    kind: Kind
    sentence: str = Field(description="For people.")
    exit_code: int | None = Field(default=None, description="Of the command; null: not known, or the job runs.")


class CurvePoint(Model):
    """The value of one step, which was closed at this time (seconds since 1970; 0: not known)."""

    step: int
    at_s: float
    value: float


class Curve(Model):
    """A value of ctx.log, step by step."""

    name: str
    points: list[CurvePoint]


class Moment(Model):
    """How far and how fast the job was at a time in seconds since 1970."""

    at_s: float
    version: int
    samples_per_s: float


class Output(Model):
    """The last lines of a process that failed."""

    name: str
    lines: list[str]


class Report(BaseModel):
    """A run. A part that is not known is empty, and ``missing`` says why."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", populate_by_name=True)

    paramserver: Literal["report 1"] = FORMAT
    job: str
    made_at_s: float = Field(description="Seconds since 1970.")
    outcome: Outcome
    status: dict[str, Any] = Field(default={}, description="As `paramserver status --json` prints it.")
    summary: dict[str, Any] = Field(default={}, description="As `--summary` writes it; empty before the end.")
    events: list[Event] = []
    moments: list[Moment] = []
    curves: list[Curve] = []
    ledger: Ledger | None = None
    settings: list[Setting] = []
    versions: dict[str, str] = {}
    host: str = ""
    output: list[Output] = []
    missing: list[str] = Field(default=[], description="Parts that the report lacks, in sentences.")
