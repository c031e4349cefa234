"""The files of the page, as they are served."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"
# Media types by the end of the name; other files are not served.
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def contents() -> dict[str, tuple[bytes, str]]:
    """The files that are served, by name: content and media type. A page that waits for no disk is painted sooner."""
    return {path.name: (path.read_bytes(), TYPES[path.suffix]) for path in STATIC.iterdir() if path.suffix in TYPES}
