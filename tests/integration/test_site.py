"""The site of `make docs` builds without a warning and without the network. Its pages load nothing from elsewhere."""

from __future__ import annotations

import html.parser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.unit.pages import PAGES, PAST, ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600.0)]

# Sphinx as `make docs` calls it, in a process that cannot connect to anything.
OFFLINE = """
import runpy, sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError(f"the site wants the network: {arguments}")
sys.addaudithook(refuse)
sys.argv[0] = "sphinx-build"
runpy.run_module("sphinx", run_name="__main__")
"""


class Loaded(html.parser.HTMLParser):
    """The addresses that a browser loads by itself to show a page; links are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "src" or (tag == "link" and name == "href"):
                self.found.append(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs:")[2]
    options = re.findall(r"sphinx-build (.*) build/site\n", recipe)[0].replace("build/", f"{folder}/").split()
    command = [sys.executable, "-c", OFFLINE, *options, str(folder / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_there(site: Path) -> None:
    pages = [page for page in [*PAGES, *PAST] if not page.is_relative_to(ROOT / "docker")]
    for page in pages:
        assert (site / page.relative_to(ROOT).with_suffix(".html")).is_file(), page
    assert "README.html" in (site / "index.html").read_text()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert [address for address in loaded.found if re.match(r"(?:https?:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import) *[\"']?(?:https?:)?//", sheet.read_text()) == [], sheet


def test_generated_parts_are_there(site: Path) -> None:
    commands = (site / "docs/commands.html").read_text()
    assert 'id="paramserver-start-worker"' in commands
    assert "--staleness INT|unbounded" in re.sub(r"<[^>]*>", "", commands)
    python = (site / "docs/python.html").read_text()
    assert 'id="paramserver.Client.push"' in python
    assert "├── ConfigError" in python
    for drawing in ("sync", "staleness", "async"):
        assert (site / f"_images/{drawing}.svg").is_file()
