"""Arithmetic without the compiled kernels, to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from paramserver.server.arithmetic import compiled


@contextmanager
def torch_only() -> Iterator[None]:
    """Meanwhile there are no compiled kernels."""
    with mock.patch.object(compiled, "kernels", return_value=None):
        yield
