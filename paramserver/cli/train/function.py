"""The launcher of a job whose workers call a function: a process of its own, which ``paramserver.launch`` starts."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paramserver.cli.common import guard, load_job
from paramserver.launcher.launcher import launch


def main() -> int:
    """Run the job that the only argument describes, as JSON; returns the exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    words: dict[str, Any] = json.loads(sys.argv[1])
    return guard(lambda: _launch(words))


def _launch(words: Mapping[str, Any]) -> int:
    settings = load_job(Path(words["config"]) if words["config"] is not None else None, words["overrides"])
    function = socket.socket(fileno=words["control"]), Path(words["directory"])
    return launch(settings, Path(words["name"]), [], words["fresh"], function)


if __name__ == "__main__":
    sys.exit(main())
