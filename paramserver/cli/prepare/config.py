"""``paramserver config``: show, check and describe the settings."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paramserver.cli.common import Sets, parse_assignments, tell
from paramserver.cli.examples import example
from paramserver.config import FIELDS, SECTIONS, Settings, load_settings, shown
from paramserver.config.settings import must_be

_WIDTH = 110
_INTRODUCTION = (
    "This page is made by `paramserver config page`. A setting has the name of its section and its own name. Write it",
    "into a file, into the environment, or behind `--set`. Some settings also have flags of their own.",
    "",
    "```",
    "[training]                                # in paramserver.toml, or in the file that --config names",
    "seed = 3",
    "",
    "PARAMSERVER_TRAINING__SEED=3              # in the environment",
    "paramserver run train.py --set training.seed=3",
    "```",
    "",
    "`paramserver config show --origin` shows the values in force, and where each one comes from.",
)

app = App(name="config", help="Show, check and describe the settings.")


@app.command(help_epilogue=example("config show"))
def show(
    *,
    origin: bool = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    config: Path | None = None,
    set_: Sets = None,
) -> int:
    """Show every setting in force and its meaning, as a TOML file. A password in the store's address is hidden.

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
    tell(_as_json(settings) if json_ else _as_toml(settings, with_origins=origin))
    return 0


@app.command(help_epilogue=example("config validate"))
def validate(file: Path | None = None, /) -> int:
    """Check a configuration file, or without one the settings that would be in force here.

    Parameters
    ----------
    file
        TOML file to check, by itself: the environment is left aside.
    """
    if file is None:
        load_settings()
        tell("The settings are valid.")
    else:
        load_settings(file, environ={})
        tell(f"{file} is valid.")
    return 0


@app.command(help_epilogue=example("config schema"))
def schema() -> int:
    """Print the JSON Schema of the configuration file, for editors."""
    tell(json.dumps(Settings.model_json_schema(), indent=2))
    return 0


@app.command(help_epilogue=example("config page"))
def page() -> int:
    """Print the page about all settings, docs/settings.md, which is made of their descriptions."""
    tell("\n".join(_page()))
    return 0


def description(key: str) -> str:
    """The meaning of the setting ``key``."""
    return FIELDS[key].description or ""


def _page() -> list[str]:
    lines = ["# Settings", "", *_INTRODUCTION]
    for section, field in Settings.model_fields.items():
        about = (getattr(field.annotation, "__doc__", "") or "").strip()
        lines += ["", f"## [{section}]", "", about, "", "| setting | values | default | meaning |", "|---|---|---|---|"]
        for key in (key for key in FIELDS if key.startswith(f"{section}.")):
            default = json.dumps(shown(key, FIELDS[key].default), ensure_ascii=False)
            cells = [f"`{key}`", must_be(key), f"`{default}`", description(key)]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


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
                lines += [f"# {part}" for part in textwrap.wrap(description(key), _WIDTH)]
                lines.append(f"{line:<34} # {origins[key]}" if with_origins else line)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _as_json(settings: Settings) -> str:
    origins = settings.origins()
    return json.dumps(
        {key: {"value": value, "origin": origins[key]} for key, value in _shown(settings).items()}, indent=2
    )
