"""``paramserver init``: a small file of settings to begin with."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from paramserver.cli.common import tell
from paramserver.config import FIELDS, SECTIONS, shown
from paramserver.config.settings import leaf_of
from paramserver.errors import ConfigError

# The settings that most jobs change first.
_CHOSEN = (
    *("cluster.servers", "cluster.workers", "consistency.mode", "training.seed", "training.slices_per_step"),
    *("checkpoint.dir", "checkpoint.every_s", "run.script", "run.args", "run.records", "run.report"),
)
_WIDTH = 100
_HEAD = """\
# Settings of paramserver. This file is read by each command of this directory; flags and PARAMSERVER_* variables win.
# Each line below shows a default: remove the "# " before a setting to change it.
# paramserver config validate {name}    checks the file
# paramserver config show --origin      shows all settings, and where each value comes from
"""


def init(file: Path = Path("paramserver.toml"), /) -> int:
    """Write a small commented file of settings to begin with. A file that exists stays as it is.

    Parameters
    ----------
    file
        The file to write.
    """
    try:
        with file.open("x", encoding="utf-8") as made:
            made.write(content(file.name))
    except FileExistsError:
        raise ConfigError(
            f"{file} exists and stays as it is: name another file, or see what it says with `paramserver config show "
            "--origin`"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
    tell(f"{file}: change it, then `paramserver run`. Every setting: `paramserver config show`")
    return 0


def content(name: str) -> str:
    """The text of the file of this name."""
    blocks = [_HEAD.format(name=name)]
    for section in SECTIONS:
        lines = [f"[{section}]"]
        for key in (key for key in _CHOSEN if key.startswith(f"{section}.")):
            lines += [f"# {part}" for part in textwrap.wrap(FIELDS[key].description or "", _WIDTH)]
            lines.append(f"# {leaf_of(key)} = {json.dumps(shown(key, FIELDS[key].default), ensure_ascii=False)}\n")
        if len(lines) > 1:
            blocks.append("\n".join(lines))
    return "\n".join(blocks)
