"""Gathers what is heard of a job, answer by answer: the death of a coordinator loses nothing that was heard before."""

from __future__ import annotations

import json
from typing import Any

from paramserver.config import FIELDS, hide_password
from paramserver.core.records.history import History
from paramserver.core.records.moments import Moment, Moments
from paramserver.core.records.steps import StepValues
from paramserver.report.data import Curve, CurvePoint, Report
from paramserver.report.data import Moment as ShownMoment
from paramserver.v1 import coordinator_pb2
from paramserver.web.facts import events_of, ledger_of, status_of
from paramserver.web.models import Event, Ledger, Setting, Status

_UNCOUNTED = "Ledger: nothing was counted. The job has no data set, or has not trained, or its coordinator is gone."


class Keeper:
    """``job``: its name. Ask coordinators with :meth:`request`, and :meth:`hear` their answers."""

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._status: Status | None = None
        self._events: dict[Event, None] = {}
        self._curves = History()
        self._moments: Moments[Moment] = Moments()
        self._settings: list[Setting] = []
        self._versions: dict[str, str] = {}
        self._host = ""
        self._ledger: Ledger | None = None
        # Of a job that is done.
        self._summary: dict[str, Any] = {}
        # The newest time of a point or moment.
        self._newest_s = 0.0

    def request(self, whole: bool = False) -> coordinator_pb2.StatusRequest:
        """Asks for what is new. ``whole``: for everything."""
        since_s = 0.0 if whole else self._newest_s
        return coordinator_pb2.StatusRequest(events=True, report=True, since_s=since_s)

    def hear(self, response: coordinator_pb2.StatusResponse) -> None:
        """The answer of a coordinator that leads the job."""
        self._status = status_of(response)
        self._events |= dict.fromkeys(events_of(response))
        self._summary = json.loads(response.summary) if response.summary else {}
        history = response.history
        for at_s, timeline, step, name, value in sorted(
            (point.at_s, point.timeline, point.step, curve.name, point.value)
            for curve in history.curves
            for point in curve.points
        ):
            self._curves.add(StepValues(step, timeline, {name: value}), at_s)
            self._newest_s = max(self._newest_s, at_s)
        for moment in history.moments:
            self._moments.add(Moment(moment.at_s, moment.version, moment.samples_per_s))
            self._newest_s = max(self._newest_s, moment.at_s)
        if history.settings:
            self._settings = [_setting(one) for one in history.settings]
            self._versions = dict(history.versions)
            self._host = history.host

    def hear_ledger(self, accounts: coordinator_pb2.AccountsResponse) -> None:
        """How often samples have counted."""
        self._ledger = ledger_of(accounts)

    def report(self, empty: Report) -> Report:
        """The report with everything that was heard."""
        status = self._status
        missing = [*empty.missing, _UNCOUNTED] if status is not None and self._ledger is None else empty.missing
        return empty.model_copy(
            update={
                "job": status.job if status else empty.job,
                "status": status.model_dump(mode="json") if status else {},
                "summary": empty.summary or self._summary,
                "events": sorted(self._events, key=lambda event: event.at_s),
                "moments": [
                    ShownMoment(at_s=one.at, version=one.version, samples_per_s=one.samples_per_s)
                    for one in self._moments.after()
                ],
                "curves": [_curve(name, self._curves) for name in self._curves.names()],
                "ledger": self._ledger,
                "settings": self._settings,
                "versions": self._versions,
                "host": self._host,
                "missing": missing,
            }
        )


def _curve(name: str, history: History) -> Curve:
    points = history.points(name)
    return Curve(name=name, points=[CurvePoint(step=one.step, at_s=one.at, value=one.value) for one in points])


def _setting(one: coordinator_pb2.SettingInForce) -> Setting:
    field = FIELDS.get(one.key)
    value = hide_password(one.value) if "://" in one.value else one.value
    return Setting(key=one.key, value=value, origin=one.origin, description=(field and field.description) or "")
