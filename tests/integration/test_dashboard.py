"""The dashboard of a real run: what it says, what it refuses, in a real browser, and runs without it."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from paramserver.machine.jobs import Job
from tests.support.integration.browser import Browser
from tests.support.integration.harness import SCRIPTS, Place, Running, place_fixture, until

TRAIN = SCRIPTS / "train.py"
PACE = ("--epochs", "200", "--pace", "0.2")
MARKUP = "<img src=x onerror=document.title='owned'>"
LOGS = f"""
import torch, paramserver as ps
import time
ctx = ps.init()
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 2))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for epoch in ctx.epochs(500):
    for (x,) in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.log(**{{{MARKUP!r}: float(loss)}})
        time.sleep(0.1)
ctx.close()
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def address_of(run: Running) -> str:
    run.wait_for(r"dashboard at http://127\.0\.0\.1:\d+")
    found = re.search(r"dashboard at (http://[0-9.:]+)", run.out)
    assert found is not None
    return found[1]


def get(url: str, headers: dict[str, str] | None = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=20.0) as answer:
        return json.load(answer)


def post(url: str, body: object, headers: dict[str, str]) -> tuple[int, Any]:
    """Status and answer."""
    given = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=given)
    try:
        with urllib.request.urlopen(request, timeout=90.0) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def admin_token(place: Place, job: str) -> str:
    """The token that this user's commands show."""
    (path,) = place.temporary.rglob(f"{job}.json")
    return Job(**json.loads(path.read_text())).admin_token


@pytest.mark.long
def test_the_page_shows_what_the_api_says_and_follows_the_job(place: Place) -> None:
    """Values, a mode that is changed by a command, a coordinator that is killed; in a real browser."""
    run = place.launch("run", TRAIN, "--servers", "2", "--workers", "2", "--replicas", "1", "--", *PACE)
    url = address_of(run)
    api = f"{url}/api/v1"
    until("training", lambda: get(f"{api}/status")["state"] == "training", 60.0)
    with Browser(place.work / "profile") as browser:
        browser.open(url)
        until("the sentence", lambda: browser.text("#sentence") == get(f"{api}/status")["sentence"], 30.0)
        shown = json.loads(
            browser.value(
                "JSON.stringify([...document.querySelectorAll('#processes tbody tr')].map("
                "row => [row.children[0].textContent, row.children[7].textContent]))"
            )
        )
        assert shown == [[p["name"], p["address"]] for p in get(f"{api}/status")["processes"]]
        assert browser.value("document.querySelectorAll('svg.curve').length") >= 2

        wish = {"mode": "async", "staleness": 4}
        assert post(f"{api}/consistency", wish, {})[0] == 401
        token = admin_token(place, get(f"{api}/status")["job"])
        assert post(f"{api}/consistency", wish, {"paramserver-admin": token, "origin": "http://evil.example"})[0] == 403
        assert get(f"{api}/status")["mode"] == "sync"
        assert post(f"{api}/consistency", wish, {"paramserver-admin": token}) == (200, {"message": "the mode is async"})
        until("the mode", lambda: "asynchronous mode with staleness 4" in browser.text("#sentence"), 30.0)

        (coordinator,) = [p["pid"] for p in get(f"{api}/status")["processes"] if p["role"] == "coordinator"]
        os.kill(coordinator, signal.SIGKILL)
        until("another coordinator", lambda: "another coordinator leads" in browser.text("#events"), 60.0)
        assert "the mode is async with staleness 4 now" in browser.text("#events")
        until("the link", lambda: browser.value("document.querySelector('#link').hidden"), 30.0)
        assert {address.split("/")[2] for address in browser.requests} == {url.removeprefix("http://")}
        refused = [text for text in browser.complaints if "Content Security" in text or "Error:" in text]
        assert refused == []
    place.paramserver("stop").check()
    run.wait()


@pytest.mark.long
def test_markup_in_names_is_text(place: Place) -> None:
    (place.work / "logs.py").write_text(LOGS)
    run = place.launch("run", "logs.py", "--workers", "1")
    url = address_of(run)
    until("the value", lambda: MARKUP in get(f"{url}/api/v1/status")["metrics"], 60.0)
    with Browser(place.work / "profile") as browser:
        browser.open(url, 390, 844, dark=True)
        until("the value", lambda: MARKUP in browser.text("#charts"), 30.0)
        assert browser.value("document.querySelectorAll('img').length") == 0
        assert browser.value("document.title") != "owned"
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    place.paramserver("stop").check()
    run.wait()


@pytest.mark.long
def test_a_run_without_the_dashboard_says_nothing_of_it_and_has_the_same_bits(place: Place) -> None:
    def digest(*flags: str) -> str:
        done = place.paramserver("run", TRAIN, *flags, "--", "--epochs", "1").check()
        assert ("dashboard" in done.out) == ("off" not in flags)
        found = re.search(r"weights sha256 (\w+)", done.out)
        assert found is not None
        return found[1]

    assert digest("--dashboard", "off") == digest()


@pytest.mark.long
def test_without_the_extra_a_run_works_and_an_address_is_refused_in_a_sentence(place: Place) -> None:
    hidden = place.work / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name in ('starlette', 'uvicorn') else find(name, *more)\n"
    )
    environ = {"PYTHONPATH": f"{hidden}:{place.environ()['PYTHONPATH']}"}
    done = place.paramserver("run", TRAIN, "--", "--epochs", "1", environ=environ).check()
    assert "dashboard" not in done.said
    refused = place.paramserver("run", TRAIN, "--dashboard", "127.0.0.1:0", "--", "--epochs", "1", environ=environ)
    assert refused.check(2).said.count("pip install 'paramserver[dashboard]'") == 1
