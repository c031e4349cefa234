"""A backup of a shard: takes in what the primary sends, and makes the same versions out of it.

While the backup catches up, it has a part of the chunks, all of one version. When it has all of them, it is a shard as
any other, which makes the versions that its primary has decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from paramserver import errors
from paramserver.core.layout.plan import Chunk
from paramserver.server.arithmetic.state import State
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.version import Version

if TYPE_CHECKING:
    from torch import Tensor


class _Shard(Protocol):
    tensors: ShardTensors

    @property
    def chunks(self) -> Mapping[int, Chunk]: ...


class Following:
    """The chunks that a backup has while it catches up. ``make`` is called in the thread for arithmetic."""

    def __init__(self, shard: _Shard) -> None:
        self._shard = shard
        # The chunks that are there; None: nothing has come.
        self.version: Version | None = None

    def begin(self, number: int) -> None:
        """The primary begins with ``number``: what was there before is forgotten."""
        self._shard.tensors.holds(())
        self.version = Version(number, (), {})

    def here(self, number: int) -> Version:
        """The version at which the backup stands. Raises GoneError if that is not version ``number``."""
        if self.version is None or self.version.number != number:
            there = "nothing" if self.version is None else f"version {self.version.number}"
            raise errors.GoneError(f"this backup has {there}, and not version {number}: bring it all of the shard")
        return self.version

    def take(self, chunks: Mapping[int, Tensor], states: Mapping[int, State]) -> None:
        """Take chunks in, which are of the version at which the backup stands."""
        version, tensors = self.version, self._shard.tensors
        assert version is not None, "the first chunks say which version they are of"
        fresh = {i: tensors.states[i].fresh() for i in chunks if i in tensors.states}
        tensors.states.update({**fresh, **states})
        have = {**version.tensors, **chunks}
        # In the order of the plan, as at the primary.
        tensors.holds([chunk for index, chunk in self._shard.chunks.items() if index in have])
        self.version = Version(version.number, tensors.chunks, have)

    def make(self, made_of: Contribution) -> None:
        """The next version of the chunks that are there. In the thread for arithmetic."""
        assert self.version is not None
        self.version = self._shard.tensors.build(self.version, [made_of], made_of.chunks)

    def lacks(self) -> Sequence[int]:
        """The chunks that are not there."""
        have = self.version.tensors if self.version is not None else {}
        return [index for index in self._shard.chunks if index not in have]
