"""What the documentation names exists: files, links, settings, commands with their flags, targets of make."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from paramserver.cli.examples import EXAMPLES
from paramserver.config.settings import FIELDS
from paramserver.testing.places import PLACES
from paramserver.transport.security import fields
from paramserver.transport.security.policy import ADMIN, CALLERS, COORDINATOR, SERVER, WORKER
from paramserver.web.operations import OPERATIONS, PREFIX
from tests.support.unit.pages import (
    FENCE,
    PAGES,
    PAST,
    ROOT,
    anchors,
    commands,
    complaint,
    exists,
    extras,
    files_named,
    links,
    modules,
    section,
    settings_named,
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert [name for name in files_named(text) if not exists(name, page.parent)] == []
    assert [name for name in settings_named(text) if name not in FIELDS] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras(text)) <= set(project["optional-dependencies"])
    paths = {PREFIX + operation.path for operation in OPERATIONS} | {f"{PREFIX}/openapi.json", f"{PREFIX}/", PREFIX}
    assert set(re.findall(rf"{PREFIX}[\w/.]*", text)) <= paths


@pytest.mark.parametrize("page", [*PAGES, *PAST], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_are_understood(page: Path) -> None:
    text = page.read_text()
    for words in commands(text):
        assert complaint(words) == "", f"paramserver {' '.join(words)}"
    for module, argument in modules(text):
        assert importlib.util.find_spec(module) is not None, module
        if module == "benchmarks" and argument not in ("", "NAME"):
            assert argument in benchmarks(), argument


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"(?:^|&& )make ([a-z-]+)", "\n".join(FENCE.findall(text)), re.MULTILINE)
        named += re.findall(r"`make ([a-z-]+)", text)
        assert set(named) <= targets, page


def test_the_contents_of_the_site_name_every_page_once() -> None:
    named = re.findall(r"^([\w/]+)$", (ROOT / "docs/_site/contents.md").read_text(), re.MULTILINE)
    pages = {name_of(page).removesuffix(".md") for page in [*PAGES, *PAST] if page.is_relative_to(ROOT / "docs")}
    assert sorted(named) == sorted(pages | {"CHANGELOG", "CONTRIBUTING", "protos/paramserver/v1/README"})


def test_every_command_stands_on_some_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in EXAMPLES if not re.search(rf"paramserver {name}\b", text)] == []


def test_the_figures_of_the_readme_are_those_of_the_pages() -> None:
    measured = "".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "reliability.md"))
    rows = re.findall(r"^\| [^|]+ \| ([^|]*\*\*[^|]*) \| `", section("README.md", "Four figures"), re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        for figure in re.findall(r"\d+(?:\.\d+)?", row):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d)", measured), f"{figure}: {row}"


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    code = [path.read_text() for path in (ROOT / "paramserver").rglob("*.py")]
    messages = re.findall(r"^\| `([^`]+)` \|", section("docs/operations.md", "What messages mean"), re.MULTILINE)
    assert len(messages) > 10
    assert [message for message in messages if not any(message in text for text in code)] == []


def test_limits_of_waits_are_the_defaults() -> None:
    table = section("docs/operations.md", "What a job waits for")
    rows = re.findall(r"^\| [^|]+ \| (\d+)[^|]* \| `([\w.]+)` \|$", table, re.MULTILINE)
    assert len(rows) >= 6
    for limit, setting in rows:
        assert FIELDS[setting].default == float(limit), setting


def test_the_table_of_security_is_the_policy() -> None:
    text = (ROOT / "docs/security.md").read_text().partition("## Who may call what")[2].partition("\n## ")[0]
    said: dict[str, set[str]] = {}
    for service, methods, cells in re.findall(r"^\| `(\w+)\.([\w ]+)` \|(.*)\|$", text, re.MULTILINE):
        columns = zip((COORDINATOR, SERVER, WORKER, ADMIN), cells.split("|"), strict=True)
        roles = {role for role, cell in columns if cell.strip()}
        said |= {f"{service}.{method}": roles for method in methods.split()}
    assert said == CALLERS


def test_the_table_of_fields_is_the_one_of_the_check() -> None:
    """Write it anew: python -c "from paramserver.transport.security.fields import page; print(page())"."""
    assert fields.page() in (ROOT / "docs/security.md").read_text()


def test_the_wire_contract_names_every_call() -> None:
    text = (ROOT / "protos/paramserver/v1/README.md").read_text()
    table = text.partition("## Who calls whom")[2].partition("\n\n`paramserver/")[0]
    assert set(re.findall(r"`(\w+)`", table)) == {method.partition(".")[2] for method in CALLERS}


def test_the_places_of_faults_are_those_of_the_code() -> None:
    text = (ROOT / "docs/chaos.md").read_text().partition("\n## Places")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)) == set(PLACES)


def benchmarks() -> list[str]:
    code = (ROOT / "benchmarks/__main__.py").read_text()
    return re.findall(r'^    "(\w+)": \w+\.\w+,$', code, re.MULTILINE)


def test_every_benchmark_is_described() -> None:
    text = (ROOT / "docs/performance.md").read_text().partition("| name | what it measures")[2].partition("\n\n")[0]
    assert len(benchmarks()) > 10
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(benchmarks())


def test_the_layout_names_every_package() -> None:
    text = (ROOT / "docs/design.md").read_text().partition("## Layout of the code")[2].partition("\n## ")[0]
    named = {
        name for cell in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert named - {"errors", "failpoints", "frames", "logs", "api"} == {
        path.parent.name for path in (ROOT / "paramserver").glob("*/__init__.py")
    }


def test_rows_of_contributing_name_things_that_their_files_have() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## If you want to")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        text = "".join((ROOT / name).read_text() for name in files_named(row) if (ROOT / name).is_file())
        for name in re.findall(r"`([A-Za-z_]+)(?:\([^`]*\))?`", row):
            assert re.search(rf"\b{name}\b", text), f"{name}: {row}"


def test_the_search_finds_what_is_wrong() -> None:
    """The tests above can fail."""
    text = "`core/gone.py: f`, train.py, `cluster.workers`, `cluster.gone` [a](gone.md#x) <https://example.org/x.py>"
    assert [name for name in files_named(text) if not exists(name)] == ["core/gone.py", "gone.md"]
    assert [name for name in settings_named(text) if name not in FIELDS] == ["cluster.gone"]
    assert list(links(text)) == ["gone.md#x"]
    assert list(commands("```\nparamserver run x.py --gone 3  # why\n```")) == [["run", "x.py", "--gone", "3"]]
    assert list(commands("Type `paramserver drain`, or `paramserver drain worker-1`.")) == [["drain", "worker-1"]]
    assert list(modules("`python -m benchmarks gone`")) == [("benchmarks", "gone")]
    assert list(extras("pip install '.[local,gone]'")) == ["local", "gone"]
    assert "--gone" in complaint(["run", "x.py", "--gone", "3"])
