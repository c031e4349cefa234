"""``paramserver config``: show, check and describe the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paramserver.cli.common import parse_assignments
from paramserver.config import SECTIONS, Settings, load_settings, shown

app = App(name="config", help="Show, check and describe the settings.")


@app.command
def show(
    *,
    origin: bool = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    config: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> int:
    """Show every setting in force, as a TOML file. A password in the store's address is hidden.

    Parameters
    ----------
    origin
        Also say where each value comes from: a flag, the environment, a file, or the default.
    json_
        Print JSON instead.
    config
        TOML file with settings.
    set_
        A setting as section.key=value; may be repeated.
    """
    settings = load_settings(config, parse_assignments(set_ or []))
    print(_as_json(settings) if json_ else _as_toml(settings, with_origins=origin))
    return 0


@app.command
def validate(file: Path | None = None, /) -> int:
    """Check a configuration file, or without one the settings that would be in force here.

    Parameters
    ----------
    file
        TOML file to check, by itself: the environment is left aside.
    """
    if file is None:
        load_settings()
        print("The settings are valid.")
    else:
        load_settings(file, environ={})
        print(f"{file} is valid.")
    return 0


@app.command
def schema() -> int:
    """Print the JSON Schema of the configuration file, for editors."""
    print(json.dumps(Settings.model_json_schema(), indent=2))
    return 0


def _shown(settings: Settings) -> dict[str, object]:
    return {key: shown(key, value) for key, value in settings.values().items()}


def _as_toml(settings: Settings, with_origins: bool) -> str:
    values = _shown(settings)
    origins = settings.origins()
    blocks = []
    for section in SECTIONS:
        lines = [f"[{section}]"]
        for key, value in values.items():
            if key.startswith(f"{section}."):
                # JSON's numbers, strings and lists are TOML's, too.
                line = f"{key.partition('.')[2]} = {json.dumps(value, ensure_ascii=False)}"
                lines.append(f"{line:<34} # {origins[key]}" if with_origins else line)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _as_json(settings: Settings) -> str:
    origins = settings.origins()
    return json.dumps(
        {key: {"value": value, "origin": origins[key]} for key, value in _shown(settings).items()}, indent=2
    )
