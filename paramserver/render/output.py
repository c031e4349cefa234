"""Rendered files on disk, or as one text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paramserver.errors import ConfigError


def write_directory(files: Mapping[str, str], directory: Path, force: bool) -> list[Path]:
    """Write the files and return their paths.

    Raises ConfigError if the directory is not empty, unless ``force``: then files of the same names are replaced.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not force and any(directory.iterdir()):
            raise ConfigError(
                f'directory "{directory}" is not empty; give another directory with --output, or overwrite with --force'
            )
        paths = [directory / name for name in files]
        for path, text in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f'"{error.filename or directory}" cannot be written ({error.strerror}); give another directory with '
            "--output"
        ) from error
    return paths


def as_stream(files: Mapping[str, str]) -> str:
    """All files as one text: a stream of YAML documents if they are YAML, else one after the other under headings."""
    if len(files) == 1:
        return next(iter(files.values()))
    if all(name.endswith(".yaml") for name in files):
        return "---\n".join(files.values())
    return "\n".join(f"# ==== {name} ====\n{text}" for name, text in files.items())
