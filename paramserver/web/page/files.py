"""The page of the dashboard as one HTML file that needs no server: styles, scripts and data are inside.

Reports are such files. The page finds the element `data`, shows it, and asks nobody. The policy in the file names the
digests of its own styles and scripts, so that nothing else runs, whatever the data contains.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path

from paramserver.web.models import Document

STATIC = Path(__file__).parent / "static"
# Media types by the end of the name; other files are not served.
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([\w.]+)">\n')
_SCRIPT = re.compile(r'<script defer src="/static/([\w.]+)"></script>\n')
_ICON = re.compile(r'<link rel="icon"[^>]*>\n')


def contents() -> dict[str, tuple[bytes, str]]:
    """The files that are served, by name: content and media type. A page that waits for no disk is painted sooner."""
    return {path.name: (path.read_bytes(), TYPES[path.suffix]) for path in STATIC.iterdir() if path.suffix in TYPES}


def one_file(document: Document, title: str, more: str = "") -> str:
    """The page as one file. ``more``: further sections as HTML, in which all texts of the job are escaped already."""
    page = (STATIC / "index.html").read_text()
    styles, scripts = _parts(_STYLE, page), _parts(_SCRIPT, page)
    page = _SCRIPT.sub("", _STYLE.sub("", _ICON.sub("", page)))
    sources = {"style-src": styles, "script-src": scripts}
    allowed = "; ".join(f"{name} {' '.join(map(_digest, texts))}" for name, texts in sources.items())
    head = f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; {allowed}">\n'
    head += "".join(f"<style>{style}</style>\n" for style in styles)
    # "<" appears in no JSON of ours, so that no text of the job ends the element or begins a comment.
    data = document.model_dump_json().replace("<", "\\u003c")
    foot = f'<script type="application/json" id="data">{data}</script>\n'
    foot += "".join(f"<script>{script}</script>\n" for script in scripts)
    page = page.replace("<title>paramserver</title>\n", f"<title>{escape(title)}</title>\n{head}")
    page = page.replace('<div id="more"></div>', f'<div id="more">{more}</div>')
    return page.replace("</body>", f"{foot}</body>")


def _parts(pattern: re.Pattern[str], page: str) -> list[str]:
    return [(STATIC / name).read_text() for name in pattern.findall(page)]


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
