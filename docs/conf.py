"""The site that `make docs` builds, from the pages of this repository as they are: README.md is its first page."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from paramserver import __version__
from paramserver.cli.examples import EXAMPLES
from paramserver.cli.main import build_app

HERE = Path(__file__).parent

project = "paramserver"
release = __version__
root_doc = "README"
# Sources are below the root of the repository, so that links between pages and to files of the code work as on a forge.
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**.md", "protos/**.md"]
exclude_patterns = [".*", "build", "dist", "docs/_site"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]

myst_heading_anchors = 4
highlight_language = "text"
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "paramserver"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_extra_path = ["_site/extra"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def contents() -> str:
    """The table of contents, which a forge does not need."""
    return (HERE / "_site" / "contents.md").read_text()


def help_of_commands() -> str:
    """Every command with its flags and its example, as ``--help`` shows them."""
    page: str = build_app().generate_docs(output_format="markdown", heading_level=1)
    page = page[page.index("**Commands**") :]
    for command, example in EXAMPLES.items():
        title = f"# paramserver {command}\n"
        assert title in page, command
        page = page.replace(title, f"{title}\n```\n{example}\n```\n")
    return page


# A forge draws these diagrams. The site would have to load a script for that, so it shows the picture of the comment.
DIAGRAM = re.compile(r"<!-- (images/\S+): (.*?) -->\n```mermaid\n.*?\n```\n", re.DOTALL)

GENERATED = {"README": contents, "docs/commands": help_of_commands}


def complete(app: Sphinx, page: str, source: list[str]) -> None:
    """Put pictures in place of diagrams, and the generated part at the end of a page."""
    source[0] = DIAGRAM.sub(r"![\2](\1)\n", source[0])
    if page in GENERATED:
        source[0] += "\n\n" + GENERATED[page]()


def draw_tree(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Keep the lines of the tree of errors."""
    if name == "paramserver.errors":
        lines[1:] = ["", "::", "", *(f"    {line}" for line in lines[1:])]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", draw_tree)
