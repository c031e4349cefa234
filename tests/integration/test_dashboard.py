"""The page and the API of a real run: what it says, what it refuses, in a real browser, and runs without it."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from paramserver.machine.jobs import Job
from tests.support.documents import answers
from tests.support.integration.browser import Browser
from tests.support.integration.harness import SCRIPTS, Place, Running, place_fixture, until
from tests.support.integration.pretended import page_of
from tests.support.unit.colours import distance

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
    path = place.runtime / f"{job}.json"
    return Job(**json.loads(path.read_text())).admin_token


SHOWN = """(async () => {
    const status = await (await fetch("/api/v1/status")).json();
    const column = (selector, at) => [...document.querySelectorAll(selector)].map(row => row.children[at].textContent);
    const workers = status.processes.filter(p => p.role === "worker").map(p => `● ${p.name}: ${p.state}`);
    const others = status.processes.filter(p => p.role !== "worker").map(p => p.address);
    return [
        [document.querySelector("h1").textContent, status.sentence],
        [column("#workers tbody tr", 0).join(), workers.join()],
        [column("#servers tbody tr", 2).join(), others.join()],
        [document.querySelector("#facts").textContent.split(" ")[1], status.version.toLocaleString("en")],
        [column("#shards tbody tr", 2).join(), status.shards.map(s => s.primary).join()],
    ].filter(([page, api]) => page !== api);
})()"""


@pytest.mark.long
@pytest.mark.timeout(400)  # its waits together
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_page_shows_what_the_api_says_and_follows_the_job(place: Place, mode: str) -> None:
    """Values, commands with and without the token, a coordinator that is killed, the end; in a real browser."""
    fleet = ("--servers", "2", "--workers", "2", "--replicas", "1", "--mode", mode)
    run = place.launch("run", TRAIN, *fleet, "--", *PACE)
    url = address_of(run)
    api = f"{url}/api/v1"
    until("training", lambda: get(f"{api}/status", place.reader())["state"] == "training", 60.0)
    with Browser(place.work / "profile") as browser:
        browser.open(place.page())
        until("the sentence", lambda: browser.text("h1") == get(f"{api}/status", place.reader())["sentence"], 30.0)
        until("page and API say the same", lambda: browser.value(SHOWN) == [], 30.0)
        until("curves", lambda: browser.value("document.querySelectorAll('#charts canvas').length") >= 1, 30.0)

        wish = {"mode": "async", "staleness": 5}
        assert post(f"{api}/consistency", wish, {})[0] == 401
        token = admin_token(place, get(f"{api}/status", place.reader())["job"])
        assert place.page().startswith(f"{url}/#key=")
        assert place.paramserver("dashboard", "--token").check().out.strip() == token
        assert post(f"{api}/consistency", wish, {"paramserver-admin": token, "origin": "http://evil.example"})[0] == 403
        assert get(f"{api}/status", place.reader())["staleness"] != 5
        assert browser.value("document.querySelector('#form-consistency')") is None
        log_in(browser, "wrong")
        until("the refusal", lambda: "no token of this job" in browser.text("#admin-login"), 30.0)
        log_in(browser, token)
        until("the controls", lambda: browser.value("document.querySelector('#form-stop') !== null"), 30.0)
        submit(browser, "consistency", "select", "async", "input[type=number]", "5")
        until("the mode", lambda: "asynchronous mode with staleness 5" in browser.text("h1"), 60.0)
        submit(browser, "checkpoint")
        until("a checkpoint", lambda: "is complete" in browser.text("#said"), 60.0)
        assert re.match(r"Wrote step-\d+-t\d+ to ", place.paramserver("checkpoint", "now").check().out)

        (coordinator,) = [
            p["pid"] for p in get(f"{api}/status", place.reader())["processes"] if p["role"] == "coordinator"
        ]
        os.kill(coordinator, signal.SIGKILL)
        until("another coordinator", lambda: "another coordinator leads" in browser.text("#events"), 60.0)
        assert "the mode is async with staleness 5 now" in browser.text("#events")
        until("the link", lambda: browser.value("document.querySelector('#link').hidden"), 30.0)

        place.paramserver("stop").check()
        run.wait()
        until("the end", lambda: "The run is over" in browser.text("#link"), 30.0)
        assert "was stopped" in browser.text("h1")
        assert "everything promised is there" in browser.text("#end")
        assert browser.value("document.querySelectorAll('#workers tbody tr').length") == 2
        assert {address.split("/")[2] for address in browser.requests} == {url.removeprefix("http://")}
        refused = [text for text in browser.complaints if "Content Security" in text or "Error:" in text]
        assert refused == []


@pytest.mark.long
def test_the_page_ends_as_the_report_of_a_run(place: Place) -> None:
    """Done, with all that was promised; a worker that was asked to leave is not red; then nothing is asked any more."""
    run = place.launch("run", TRAIN, "--workers", "3", "--report", "r.html", "--", "--epochs", "24", "--pace", "0.1")
    url = address_of(run)
    until("training", lambda: get(f"{url}/api/v1/status", place.reader())["state"] == "training", 60.0)
    with Browser(place.work / "profile") as browser:
        browser.open(place.page())
        until("workers", lambda: browser.value("document.querySelectorAll('#workers tbody tr').length") == 3, 30.0)
        place.paramserver("drain", "worker-2").check()
        assert run.wait().code == 0
        until("the end", lambda: "The run is over" in browser.text("#link"), 30.0)
        assert re.search(r"^Job \S+ is done: sync, \d+ steps", browser.text("h1"))
        assert "epoch 24 of 24 · 100 % done" in browser.text("#facts")
        assert "everything promised is there" in browser.text("#end")
        assert "r.html" in browser.text("#end")
        assert browser.value("[...document.querySelectorAll('#workers .bad, #servers .bad')].length") == 0
        assert "worker-2 stopped" in browser.text("#workers")
        assert browser.value("document.querySelector('#controls').hidden")
        assert browser.value("document.querySelectorAll('#ledger tbody tr').length") == 24
        filtered = "f => {f.value = 'Worker-2'; f.dispatchEvent(new Event('input'))}"
        browser.value(f"({filtered})(document.querySelector('#event-filter'))")
        shown = browser.value("[...document.querySelectorAll('#events tbody tr')].map(row => row.textContent)")
        assert shown
        assert all("worker-2" in row for row in shown)
        ticks = {"[1e-4, 1.2e-4, 1.4e-4]": "1e-4,1.2e-4,1.4e-4", "[0, 100, 200]": "0,100,200", "[0.5]": "0.5"}
        assert {made: browser.value(f"distinct({made}).join()") for made in ticks} == ticks


@pytest.mark.long
def test_the_page_of_a_run_that_fails_says_so_and_why(place: Place) -> None:
    script = place.work / "fails.py"
    script.write_text(LOGS.replace("time.sleep(0.1)", "time.sleep(0.1)\n        assert epoch < 2, 'no samples left'"))
    run = place.launch("run", script, "--workers", "2")
    with Browser(place.work / "profile") as browser:
        browser.open(address_of(run))
        assert run.wait().code == 1
        until("the end", lambda: "The run is over" in browser.text("#link"), 30.0)
        assert re.search(r"^Job \S+ has failed: worker-\d failed with exit code 1", browser.text("h1"))
        assert "its script failed: AssertionError: no samples left" in browser.text("#end")


def log_in(browser: Browser, token: str) -> None:
    browser.value("document.querySelector('#controls').open = true")
    submit(browser, "login", "input", token, form="#admin-login")


def submit(browser: Browser, name: str, *fields: str, form: str = "") -> None:
    """Fill fields of a form, selector and value in turn, and press its button."""
    chosen = form or f"#form-{name}"
    for selector, value in zip(fields[::2], fields[1::2], strict=True):
        field = f"document.querySelector({json.dumps(f'{chosen} {selector}')})"
        browser.value(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('change'))")
    browser.value(f"document.querySelector({json.dumps(f'{chosen} button')}).click()")


@pytest.mark.long
@pytest.mark.timeout(400)  # axe-core takes its time on busy machines
def test_a_page_for_everybody(place: Place) -> None:
    """Accessible by rules that a program can check, with the keyboard alone, small, and painted soon."""
    run = place.launch("run", TRAIN, "--workers", "2", "--checkpoint-every", "10", "--", *PACE)
    url = address_of(run)
    until("training", lambda: get(f"{url}/api/v1/status", place.reader())["metrics"], 60.0)
    with Browser(place.work / "profile") as browser:
        for width, dark in ((1366, False), (390, True)):
            browser.open(place.page(), width, 844, dark)
            until("curves", lambda: browser.value("document.querySelectorAll('#charts canvas').length") >= 2, 30.0)
            opened = "['#controls', '#ledger-box', '#charts details']"
            browser.value(f"{opened}.forEach(box => document.querySelector(box).open = true)")
            assert browser.violations() == []
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
            until("numbers", lambda: browser.value("document.querySelectorAll('#charts tbody tr').length") >= 2, 30.0)
        painted = []
        for _ in range(5):
            browser.open(place.page())
            until("the job", lambda: "training" in browser.text("h1"), 30.0)
            entries = "performance.getEntriesByName('first-contentful-paint').map(one => one.startTime)[0] ?? 1e9"
            painted.append(browser.value(entries))
        size = "[...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]"
        assert browser.value(f"{size}.reduce((sum, one) => sum + one.encodedBodySize, 0)") <= 150_000
        assert min(painted) <= 300.0, painted
        reached = set()
        for _ in range(40):
            browser.press("Tab", 9)
            reached.add(browser.value("document.activeElement.closest('[id]')?.id"))
            if browser.value("document.activeElement.dataset.axis") == "steps":
                browser.press("Enter", 13, "\r")
                assert browser.value("document.activeElement.getAttribute('aria-pressed')") == "true"
        assert {"axis", "controls", "ledger-box", "settings-box"} <= reached
    place.paramserver("stop").check()
    run.wait()


def _until_shown(browser: Browser, selector: str) -> None:
    until(selector, lambda: MARKUP in browser.text(selector), 30.0)


@pytest.mark.long
def test_the_page_shows_markup_as_text_wherever_it_stands(tmp_path: Path) -> None:
    """A worker, a curve, an event and an error with markup; and the worker that is blamed is marked."""
    blame = [f"step 7 waited 3.4 s for slice 5 on {MARKUP}", "worker-0 is slow"]
    status = {"blame": blame, "state": "failed", "reason": MARKUP, "sentence": MARKUP}
    with page_of(answers(MARKUP, status)) as url, Browser(tmp_path / "profile") as browser:
        browser.open(url)
        until("the worker", lambda: MARKUP in browser.text("#workers"), 30.0)
        for place in ("h1", "#blame", "#events", "#hosts", "#charts"):
            _until_shown(browser, place)
        assert browser.value("document.querySelectorAll('img').length") == 0
        assert browser.value("document.title") != "owned"
        assert "worker-0" in browser.text("tr.culprit")
        assert {address.split("/")[2] for address in browser.requests} == {url.removeprefix("http://")}
        assert browser.complaints == []


@pytest.mark.long
def test_colour_blind_people_can_tell_phases_and_states_apart(tmp_path: Path) -> None:
    """The browser shows the page as they see it. Colours of phases stay apart; states have a symbol and a word."""
    with page_of(answers("worker-2", {"state": "training"})) as url, Browser(tmp_path / "profile") as browser:
        for dark in (False, True):
            browser.open(url, dark=dark)
            until("the legend", lambda: browser.value("document.querySelectorAll('#phases .swatch').length") == 6, 30.0)
            until("the states", lambda: "worker-1 failed" in browser.text("#workers"), 30.0)
            for eyes in ("none", "protanopia", "deuteranopia", "tritanopia"):
                browser.sees_as(eyes)
                seen = [browser.pixel("#phases .swatch", number) for number in range(6)]
                apart = [distance(one, other, "everybody else") for one, other in combinations(seen, 2)]
                assert min(apart) >= 14.0, (eyes, seen)
        said = browser.value("[...document.querySelectorAll('.well, .wait, .bad')].map(one => one.textContent)")
        assert {text[0] for text in said} == {"●", "◐", "▲"}
        assert all(re.match(r"[●◐▲] \w", text) for text in said)


@pytest.mark.long
def test_markup_in_names_is_text(place: Place) -> None:
    (place.work / "logs.py").write_text(LOGS)
    run = place.launch("run", "logs.py", "--workers", "1")
    url = address_of(run)
    until("the value", lambda: MARKUP in get(f"{url}/api/v1/status", place.reader())["metrics"], 60.0)
    with Browser(place.work / "profile") as browser:
        browser.open(place.page(), 390, 844, dark=True)
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
