"""What stands in rendered files."""

from __future__ import annotations

from typing import Any

import yaml

from paramserver.render.request import Files


def objects(files: Files) -> list[dict[str, Any]]:
    """All YAML documents."""
    return [one for text in files.values() for one in yaml.safe_load_all(text)]


def pods(files: Files) -> dict[str, dict[str, Any]]:
    """Specifications of pods by the name of their first container, wherever they stand."""
    found: dict[str, dict[str, Any]] = {}

    def look(value: object) -> None:
        if isinstance(value, dict):
            if "containers" in value:
                found[value["containers"][0]["name"]] = value
            for part in value.values():
                look(part)
        elif isinstance(value, list):
            for part in value:
                look(part)

    look(objects(files))
    return found


def containers(files: Files) -> dict[str, dict[str, Any]]:
    """Containers of pods by name; no init containers."""
    return {one["name"]: one for pod in pods(files).values() for one in pod["containers"]}
