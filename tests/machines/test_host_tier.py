"""Two hosts with four workers each, and two servers elsewhere: the link of a host carries one pull and one push."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.integration.harness import Running, until
from tests.support.machines.cluster import PATIENCE_S, SERVERS, TEST_S, WORKERS, Cluster, Site
from tests.support.machines.gated import SLICES_PER_STEP, build_model
from tests.support.machines.network import Traffic

pytestmark = pytest.mark.timeout(TEST_S)

GATED = Path(__file__).resolve().parents[1] / "support" / "machines" / "gated.py"
HOSTS = WORKERS[:2]
PER_HOST = 4
FROM, TO = 4, 24
MODEL_BYTES = 4 * sum(parameter.numel() for parameter in build_model().parameters())
TIER = f"pulls weights for {PER_HOST - 1} other workers of its host"


class Measured:
    """One job. ``tier``: cluster.host_tier. By host, bytes and mapped memory in units of the model's size."""

    def __init__(self, site: Site, tier: str) -> None:
        settings = {"cluster.workers": len(HOSTS) * PER_HOST, "training.slices_per_step": SLICES_PER_STEP}
        with Cluster(site, settings, insecure=True) as cluster:
            self.gates = {version: cluster.summary_path().with_name(f"gate-{version}") for version in (FROM, TO)}
            self._tier, self._cluster, self._network = tier, cluster, site.network
            cluster.coordinator()
            for machine in SERVERS:
                cluster.start("server", machine, "--join", cluster.join, environ=self._environ(machine))
            workers = {host: [self._worker(host, number) for number in range(PER_HOST)] for host in HOSTS}
            everybody = [worker for group in workers.values() for worker in group]
            self._wait_at(FROM, everybody)
            if tier == "auto":
                self.status = cluster.status_when(
                    "each host has a worker that pulls",
                    lambda facts: [one["host_tier"] for one in facts["processes"]].count(TIER) == len(HOSTS),
                )
            before = {host: site.network.traffic(host) for host in HOSTS}
            self.gates[FROM].touch()
            self._wait_at(TO, everybody)
            after = {host: site.network.traffic(host) for host in HOSTS}
            self.received = {host: _per_step(before[host], after[host])[1] for host in HOSTS}
            self.sent = {host: _per_step(before[host], after[host])[0] for host in HOSTS}
            self.mapped = {host: sum(map(_shared_bytes, site.network.pids(host))) / MODEL_BYTES for host in HOSTS}
            self.gates[TO].touch()
            cluster.finish()
            self.weights: str = cluster.summary()["weights_sha256"]

    def _environ(self, machine: str) -> dict[str, str]:
        """These machines share the memory of this one, so that each needs a place of its own to meet."""
        meeting = self._cluster.site.place.root / f"meeting-{machine}"
        meeting.mkdir(exist_ok=True)
        return {
            "PARAMSERVER_CLUSTER__TRANSPORT": "bulk",
            "PARAMSERVER_CLUSTER__HOST_TIER": self._tier,
            "PARAMSERVER_CLUSTER__MEETING_DIR": str(meeting),
            "MACHINES_GATES": ",".join(f"{version}:{path}" for version, path in self.gates.items()),
            "OMP_NUM_THREADS": "1",
        }

    def _worker(self, host: str, number: int) -> Running:
        words = ("--join", self._cluster.join, "--", GATED)
        return self._cluster.start("worker", host, *words, name=f"{host}-{number}", environ=self._environ(host))

    def _wait_at(self, version: int, workers: list[Running]) -> None:
        for worker in workers:
            worker.wait_for(f"is at version {version}", PATIENCE_S)


def _per_step(before: Traffic, after: Traffic) -> tuple[float, float]:
    """Bytes sent and received in one step, in units of the model's size."""
    unit = MODEL_BYTES * (TO - FROM)
    return (after.bytes_sent - before.bytes_sent) / unit, (after.bytes_received - before.bytes_received) / unit


def _shared_bytes(pid: int) -> int:
    """This process's part of the memory that it shares with others, if each page is divided among those who map it."""
    found, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = "memfd:paramserver" in line
        elif ours and words[0] == "Pss:":
            found += int(words[1]) << 10
    return found


def test_a_host_receives_weights_and_sends_gradients_once_per_step(site: Site) -> None:
    shared, apart = Measured(site, "auto"), Measured(site, "off")
    print({"once": (shared.received, shared.sent, shared.mapped), "each": (apart.received, apart.sent)})
    assert all(1.0 <= times <= 1.05 for times in shared.received.values()), shared.received
    assert all(times >= 0.95 * PER_HOST for times in apart.received.values()), apart.received
    assert all(1.0 <= times <= 1.05 for times in shared.sent.values()), shared.sent
    assert all(times >= 0.95 * PER_HOST for times in apart.sent.values()), apart.sent
    # Each worker's own gradients; of the weights, the version at hand, the former one, and the next one.
    assert all(1.0 <= copies - PER_HOST <= 3.1 for copies in shared.mapped.values()), shared.mapped
    assert shared.weights == apart.weights
    until("nothing is left", lambda: not any(list(path.iterdir()) for path in site.place.root.glob("meeting-*")), 5.0)
