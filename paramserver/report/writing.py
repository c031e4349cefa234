"""Writes a report to a file: whole or not at all, in the format that the name of the file says."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from paramserver import errors
from paramserver.core import shown
from paramserver.report.data import FORMAT, Report

# Suffix of a file to format.
FORMATS = {".html": "html", ".htm": "html", ".md": "md", ".markdown": "md", ".json": "json"}
# Of a file that exists, so much is looked at.
_LOOK = 2000
# Bytes that have to be free before a run begins. Most reports are larger, but a disk without these is full.
_ROOM = 16_384
_MARKS = (f"paramserver {FORMAT}".encode(), f'"paramserver": "{FORMAT}"'.encode())
_MARKDOWN_MARK = f"<!-- paramserver {FORMAT} -->\n"


def format_of(path: Path, setting: str = "the name of the report") -> str:
    """ "html", "md" or "json". Raises UserError for other names. ``setting``: where the name comes from."""
    found = FORMATS.get(path.suffix.lower())
    if found is None:
        raise errors.UserError(f'{setting} is "{path}", but must end with .html, .md or .json')
    return found


def rendered(report: Report, format_: str) -> str:
    """The text of a file. All texts in it are harmless (see `core.shown`)."""
    report = Report.model_validate(shown.values(report.model_dump(by_alias=True)))
    if format_ == "json":
        return report.model_dump_json(indent=2) + "\n"
    if format_ == "md":
        from paramserver.report.markdown import markdown_of

        return _MARKDOWN_MARK + markdown_of(report)
    from paramserver.report.html import html_of

    return html_of(report)


def check_report(path: Path, setting: str = "run.report") -> None:
    """Raises UserError if no report can be written there: before hours of training, not after them.

    An earlier report may be replaced. Another file may not.
    """
    format_of(path, setting)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            raise errors.UserError(f"{setting} is {path}, which is a device or the like: name a file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
            file.write(bytes(_ROOM))
            file.flush()
        if path.exists() and path.stat().st_size and not is_report(path):
            raise errors.UserError(f"{setting} is {path}, which exists and is no report: name another file")
    except OSError as error:
        raise errors.UserError(f"{setting} cannot be written to {path}: {error.strerror or error}") from error


def is_report(path: Path) -> bool:
    """Whether the file begins like a report."""
    with path.open("rb") as file:
        begin = file.read(_LOOK)
    return any(mark in begin for mark in _MARKS)


def write_report(path: Path, report: Report, setting: str = "run.report") -> None:
    """Write the file whole or not at all. Raises UserError if that fails."""
    write_text(path, rendered(report, format_of(path, setting)), setting)


def compared(one: Report, other: Report, names: tuple[str, str]) -> str:
    """The text of a file that compares two runs, as Markdown. ``names``: of the runs."""
    from paramserver.report.markdown import comparison_of

    return _MARKDOWN_MARK + comparison_of(one, other, names)


def write_text(path: Path, text: str, setting: str) -> None:
    """Write a file whole or not at all. Raises UserError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise errors.UserError(f"{setting} cannot be written to {path}: {error.strerror or error}") from error
