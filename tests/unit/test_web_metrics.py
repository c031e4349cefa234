"""The metrics: the page lists them all, the text is that of Prometheus, and alerts use only metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from paramserver.coordinator.history import overdue
from paramserver.core.job.status import State
from paramserver.core.shown import one_line
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.web.facts import events_of, status_of
from paramserver.web.metrics.exposition import exposition
from paramserver.web.metrics.job import METRICS, samples
from paramserver.web.metrics.members import MEMBER, SERVER, WORKER

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/metrics.md"
RULES = ROOT / "deploy/monitoring/rules.yml"
DASHBOARD = ROOT / "deploy/monitoring/grafana/dashboards/paramserver.json"
STRANGE = 'x"\n\\<img src=x>'


def response() -> coordinator_pb2.StatusResponse:
    asynchronous = types_pb2.Consistency(mode=types_pb2.MODE_ASYNC, staleness=3)
    return coordinator_pb2.StatusResponse(
        job="digits",
        state="training",
        view=types_pb2.View(consistency=asynchronous),
        term=2,
        takeovers=1,
        expected_servers=2,
        expected_workers=2,
        losses=4,
        troubles={"checkpoint": "it is overdue"},
        holders=[coordinator_pb2.ShardStatus(shard=0, primary="server-0", state="no backup")],
        processes=[
            coordinator_pb2.ProcessStatus(
                role="server", name="server-0", state="training", server={"bytes_pushed": 77}
            ),
            coordinator_pb2.ProcessStatus(role="worker", name="worker-0", clock=9, metrics={STRANGE: 0.5}),
            coordinator_pb2.ProcessStatus(role="worker", name="worker-1", clock=6),
            coordinator_pb2.ProcessStatus(role="worker", name="worker-2", clock=1, gone=True, state="failed"),
        ],
        events=[coordinator_pb2.Event(at_s=5.0, kind="checkpoint"), coordinator_pb2.Event(at_s=7.0, kind="joined")],
    )


def scraped(said: coordinator_pb2.StatusResponse) -> dict[tuple[str, tuple[str, ...]], float]:
    text = exposition(METRICS, samples(status_of(said), events_of(said))).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_has_values_in_a_full_status() -> None:
    said = response()
    found = samples(status_of(said), events_of(said))
    assert [name for name, values in found.items() if not values] == []


def test_what_prometheus_reads_is_what_the_status_says() -> None:
    found = scraped(response())
    expected = {
        ("paramserver_leads", ()): 1,
        ("paramserver_losses_total", ()): 4,
        ("paramserver_clock_spread", ()): 3,
        ("paramserver_staleness_bound", ()): 3,
        ("paramserver_members", ("worker",)): 2,
        ("paramserver_members_expected", ("worker",)): 2,
        ("paramserver_server_received_bytes_total", ("server-0",)): 77,
        ("paramserver_shards", ("no backup",)): 1,
        ("paramserver_shards", ("replicated",)): 0,
        ("paramserver_value", (one_line(STRANGE),)): 0.5,
        ("paramserver_last_checkpoint_timestamp_seconds", ()): 5,
        ("paramserver_trouble", ("checkpoint",)): 1,
        ("paramserver_process_state", ("failed", "worker", "worker-2")): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert sum(found["paramserver_job_state", (str(state),)] for state in State) == 1


def test_a_coordinator_that_stands_by_says_only_that() -> None:
    found = scraped(coordinator_pb2.StatusResponse(job="digits", state="waiting"))
    ours = {key: value for key, value in found.items() if key[0].startswith("paramserver_")}
    assert ours == {("paramserver_leads", ()): 0}


def test_the_page_lists_all_metrics() -> None:
    rows = re.findall(r"^\| `(paramserver_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    listed = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows]
    own = [metric for metric in (*SERVER, *WORKER) if metric not in MEMBER]
    metrics = [*METRICS, *MEMBER, *own]
    assert listed == [(metric.shown, metric.kind, metric.labels, metric.help) for metric in metrics]


# Names that a scrape of any role can bring, or that Prometheus makes by itself.
SHOWN = {metric.shown for metric in (*METRICS, *SERVER, *WORKER)} | {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
}
_WORDS = re.compile(r"\b(?:paramserver|process)_\w+")


def test_the_dashboard_uses_metrics_and_labels_that_there_are() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    labels = {metric.shown: {*metric.labels, "process", "job"} for metric in (*METRICS, *SERVER, *WORKER)}
    for panel in panels:
        for target in panel["targets"]:
            used = set(_WORDS.findall(target["expr"]))
            assert used, panel["title"]
            assert used <= SHOWN, panel["title"]
            known = set().union(*(labels.get(name, {"process", "job"}) for name in used))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]
            assert set(re.findall(r"\bby \((\w+)\)", target["expr"])) <= known, panel["title"]


def test_alerts_use_metrics_and_states_that_there_are_and_are_on_the_page() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        assert set(_WORDS.findall(rule["expr"])) <= SHOWN, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["annotations"]["summary"]
    states = {
        state for rule in rules for value in re.findall(r'state=~"([^"]*)"', rule["expr"]) for state in value.split("|")
    }
    assert states <= {str(state) for state in State}
    assert any(f'trouble="{overdue.KEY}"' in rule["expr"] for rule in rules)
    assert set(re.findall(r"^\| `(Paramserver\w+)`", PAGE.read_text(), re.MULTILINE)) == {
        rule["alert"] for rule in rules
    }
