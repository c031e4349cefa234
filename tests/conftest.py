"""What all tests share: property tests without a time limit of their own, and the same examples on every run."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("repeatable")
