"""What the documentation names exists: files, links, settings, commands with their flags, targets of make."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.cli.main import build_app, split_script_arguments
from paramserver.config.settings import FIELDS, Settings
from paramserver.testing.places import PLACES
from paramserver.transport.security.policy import ADMIN, CALLERS, COORDINATOR, SERVER, WORKER

ROOT = Path(__file__).parents[2]
# Not the notebooks, which describe the code of their day.
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("protos/**/*.md"), *ROOT.glob("docker/**/*.md")]
)
PAGES.remove(ROOT / "CHANGELOG.md")
# Scripts and files of a user in examples.
USERS = {"train.py", "my-scripts/train.py"}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def files_named(text: str) -> Iterator[str]:
    """``core/layout/plan.py`` and the like, wherever it stands; without the function or the test that may follow."""
    for found in re.finditer(r"(?<![\w/.:<\[-])(?!/)[\w./*-]*[\w*]\.(?:py|c|proto)(?![\w.])", text):
        if found.group() not in USERS:
            yield found.group()


def exists(name: str) -> bool:
    """From the root of the repository, or from the package, as ``core/layout/plan.py`` is named for short."""
    return any(any(base.glob(name)) for base in (ROOT, ROOT / "paramserver", ROOT / "protos/paramserver/v1"))


def links(text: str) -> Iterator[str]:
    for found in re.finditer(r"\]\(([^)\s]+)\)", text):
        if "://" not in found.group(1):
            yield found.group(1)


def anchors(text: str) -> set[str]:
    """Of the headings, as forges make them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def settings_named(text: str) -> Iterator[str]:
    sections = "|".join(Settings.model_fields)
    yield from re.findall(rf"`((?:{sections})\.[a-z]\w*)\b[^`/]*`", text)
    yield from re.findall(rf"--set ((?:{sections})\.\w+)=", text)


def commands(text: str) -> Iterator[list[str]]:
    """The words after ``paramserver`` of every line of an example, without what belongs to the user's script."""
    for fence in FENCE.findall(text):
        for line in fence.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:.*(?:-- |\$ |exec \S+ ))?(?:[A-Z_]+=\S+ )*paramserver ((?:[a-z]|--).*)", line)
            if found is None or "…" in line:
                continue
            words = re.split(r"  +#|  +|\s[>|] ", found.group(1))[0]
            yield split_script_arguments(shlex.split(words, comments=True))[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert [name for name in files_named(text) if not exists(name)] == []
    assert [name for name in settings_named(text) if name not in FIELDS] == []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_understood(page: Path) -> None:
    app = build_app()
    for words in commands(page.read_text()):
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"(?:^|&& )make ([a-z-]+)", "\n".join(FENCE.findall(text)), re.MULTILINE)
        named += re.findall(r"`make ([a-z-]+)", text)
        assert set(named) <= targets, page


def test_the_table_of_security_is_the_policy() -> None:
    text = (ROOT / "docs/security.md").read_text().partition("## Who may call what")[2].partition("\n## ")[0]
    said: dict[str, set[str]] = {}
    for service, methods, cells in re.findall(r"^\| `(\w+)\.([\w ]+)` \|(.*)\|$", text, re.MULTILINE):
        columns = zip((COORDINATOR, SERVER, WORKER, ADMIN), cells.split("|"), strict=True)
        roles = {role for role, cell in columns if cell.strip()}
        said |= {f"{service}.{method}": roles for method in methods.split()}
    assert said == CALLERS


def test_the_wire_contract_names_every_call() -> None:
    text = (ROOT / "protos/paramserver/v1/README.md").read_text()
    table = text.partition("## Who calls whom")[2].partition("\n\n`paramserver/")[0]
    assert set(re.findall(r"`(\w+)`", table)) == {method.partition(".")[2] for method in CALLERS}


def test_the_places_of_faults_are_those_of_the_code() -> None:
    text = (ROOT / "docs/chaos.md").read_text().partition("\n## Places")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)) == set(PLACES)


def test_every_benchmark_is_described() -> None:
    text = (ROOT / "docs/performance.md").read_text().partition("| name | what it measures")[2].partition("\n\n")[0]
    code = (ROOT / "benchmarks/__main__.py").read_text()
    benchmarks = re.findall(r'^    "(\w+)": \w+\.\w+,$', code, re.MULTILINE)
    assert len(benchmarks) > 10
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(benchmarks)


def test_the_layout_names_every_package() -> None:
    text = (ROOT / "docs/design.md").read_text().partition("## Layout of the code")[2].partition("\n## ")[0]
    named = {
        name for cell in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert named - {"errors", "failpoints", "logs", "api"} == {
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
    assert [name for name in files_named(text) if not exists(name)] == ["core/gone.py"]
    assert [name for name in settings_named(text) if name not in FIELDS] == ["cluster.gone"]
    assert list(links(text)) == ["gone.md#x"]
    assert list(commands("```\nparamserver run x.py --gone 3  # why\n```")) == [["run", "x.py", "--gone", "3"]]
    with pytest.raises(Exception, match="--gone"):
        build_app().parse_args(["run", "x.py", "--gone", "3"], exit_on_error=False, print_error=False)
