"""The pages of the documentation, and what their text names: files, links, settings, commands, modules."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cyclopts import App, CycloptsError

from paramserver.cli.examples import EXAMPLES
from paramserver.cli.main import build_app, split_script_arguments
from paramserver.config.settings import Settings

ROOT = Path(__file__).parents[3]
# Pages about the past: their links are checked, but they describe the code of their day.
PAST = [ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/notes/*.md"))]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("protos/**/*.md"), *ROOT.glob("docker/**/*.md")} - {*PAST}
)
# Scripts and files of a user in examples.
USERS = {
    "train.py",
    "my-scripts/train.py",
    "chaos.toml",
    "cluster.toml",
    "paramserver.toml",
    "units/cluster.toml",
    "k8s/config.yaml",
    "prometheus.yml",
    "docker-compose.override.yml",
}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?<![\w/.:<\[-])(?!/)[\w./*-]*[\w*]\.(?:py|c|proto|md|toml|ya?ml|sh|css|svg|png)(?![\w.])")
_COMMAND = re.compile(r"(?:.*(?:-- |\$ |exec \S+ |/bin/))?(?:[A-Z_]+=\S+ )*paramserver ((?:[a-z]|--).*)")


def files_named(text: str) -> Iterator[str]:
    """``core/layout/plan.py`` and the like, wherever it stands; without the function or the test that may follow."""
    for found in _FILE.finditer(text):
        if found.group() not in USERS:
            yield found.group()


def exists(name: str, folder: Path = ROOT) -> bool:
    """From the page, from the root of the repository, or from the package, as ``core/layout/plan.py`` is for short."""
    return any(any(base.glob(name)) for base in (folder, ROOT, ROOT / "paramserver", ROOT / "protos/paramserver/v1"))


def links(text: str) -> Iterator[str]:
    """The targets of links and pictures within the repository."""
    for found in re.finditer(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
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


def command_in(line: str) -> list[str] | None:
    """The words after ``paramserver`` in a line of a terminal, without what belongs to the user's script."""
    found = _COMMAND.match(line)
    if found is None or "…" in line:
        return None
    words = re.split(r"  +#|  +|\s[>|] ", found.group(1))[0]
    return split_script_arguments(shlex.split(words, comments=True))[0]


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a page: in the lines of examples, and within sentences."""
    for fence in FENCE.findall(text):
        for line in fence.replace("\\\n", " ").splitlines():
            if (words := command_in(line)) is not None:
                yield words
    for span in re.findall(r"`(paramserver [^`|]+)`", FENCE.sub("", text)):
        words = command_in(span)
        if words is not None and " ".join(words) not in EXAMPLES:  # a bare name such as `paramserver drain`
            yield words


@cache
def _app() -> App:
    return build_app()


def complaint(words: list[str]) -> str:
    """The error message of the command line for these words; empty if they are understood. Nothing is run."""
    own, _ = split_script_arguments(words)
    try:
        _app().parse_args(own, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return ""


def modules(text: str) -> Iterator[tuple[str, str]]:
    """Name and first argument of each ``python -m``."""
    for found in re.finditer(r"python -m ([\w.]+)(?: +([\w/.-]+))?", text):
        yield found.group(1), found.group(2) or ""


def extras(text: str) -> Iterator[str]:
    """The extras that are installed, as in ``pip install '.[local,demo]'``."""
    for found in re.finditer(r"pip install [^\n]*\[([a-z,]+)\]", text):
        yield from found.group(1).split(",")


def code(text: str, language: str = "python") -> list[str]:
    """The blocks of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(page: str, title: str) -> str:
    """The part of a page below the heading that begins with ``title``."""
    return (ROOT / page).read_text().partition(f"\n## {title}")[2].partition("\n## ")[0]
