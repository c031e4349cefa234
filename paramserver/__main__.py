"""``python -m paramserver`` is the same as the command ``paramserver``."""

from __future__ import annotations

import os
import sys

# Python puts the current directory first. Its modules are not to stand in for others, unless it has this package: then
# the first place is that of the command, as for the command itself.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    sys.path[0] = os.path.dirname(sys.executable)

from paramserver.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
