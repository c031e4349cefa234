"""An optimizer of the user's own in real processes: servers run it if their configuration names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import ROOT, Place, place_fixture, read_summary

SCRIPT = """
import torch
import torch.nn.functional as F
import paramserver as ps
from tests.support.own_optimizers import Lion
from tests.support.cluster.programs import Aligned, dataset

ctx = ps.init()
model = Aligned()
loader = torch.utils.data.DataLoader(dataset(64), batch_size=8)
model, optimizer, loader = ctx.prepare(model, Lion(model.parameters(), lr=0.01), loader)
for _ in ctx.epochs(1):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
ctx.close()
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.mark.long
def test_servers_run_what_their_configuration_names_and_nothing_else(place: Place) -> None:
    script = place.work / "own.py"
    script.write_text(SCRIPT)
    summaries = [place.work / "own.json", place.work / "alone.json"]
    environ = {"PYTHONPATH": str(ROOT)}
    flags: list[str | Path] = ["run", script, "--servers", "2", "--set", "training.slices_per_step=1"]
    named: list[str | Path] = ["--set", "cluster.optimizers=tests.support.own_optimizers:Lion"]
    place.paramserver(*flags, *named, "--summary", summaries[0], environ=environ).check()
    place.python(script, environ={**environ, "PARAMSERVER_RUN__SUMMARY": str(summaries[1])}).check()
    cluster, alone = map(read_summary, summaries)
    assert cluster["steps"] == alone["steps"] == 8
    assert cluster["weights_sha256"] == alone["weights_sha256"]
    done = place.paramserver(*flags, environ=environ)
    assert done.code == 2
    assert "name it in its cluster.optimizers" in done.out + done.err
