"""``python -m paramserver`` is the same as the command ``paramserver``."""

from __future__ import annotations

import sys

from paramserver.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
