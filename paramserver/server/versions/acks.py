"""Acknowledgements of chunks, for the flow control of workers (`worker/gradients/flow_control.py`).

Lives in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from paramserver.v1 import shard_pb2

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Upload:
    nonce: int
    chunks: int = 0


class Acks:
    """The uploads in progress at one shard, and how many chunks of each have been received."""

    def __init__(self) -> None:
        # By worker. One contribution may be uploaded twice at a time, since a network may repeat messages.
        self._present: dict[int, list[_Upload]] = {}
        self._listeners: dict[int, list[asyncio.Event]] = {}

    @contextmanager
    def counting(self, worker: int, nonce: int) -> Iterator[Callable[[], None]]:
        """Context of one upload; call the returned function for each chunk that has been received."""
        one = _Upload(nonce)

        def came() -> None:
            one.chunks += 1
            for listener in self._listeners.get(worker, ()):
                listener.set()

        with _among(self._present, worker, one):
            yield came

    @contextmanager
    def heard(self, worker: int, listener: asyncio.Event) -> Iterator[Callable[[], list[shard_pb2.Ack]]]:
        """Context of one pull: sets ``listener`` at each chunk of this worker; returns a function for the new acks."""
        said: dict[int, int] = {}

        def news() -> list[shard_pb2.Ack]:
            nonlocal said
            fresh: dict[int, int] = {}
            for one in self._present.get(worker, ()):
                if one.chunks:
                    fresh[one.nonce] = max(one.chunks, fresh.get(one.nonce, 0))
            told = [
                shard_pb2.Ack(nonce=nonce, chunks=chunks)
                for nonce, chunks in fresh.items()
                if said.get(nonce) != chunks
            ]
            said = fresh
            return told

        with _among(self._listeners, worker, listener):
            yield news


@contextmanager
def _among(groups: dict[int, list[T]], key: int, one: T) -> Iterator[None]:
    """Context in which ``one`` is in its group. Empty groups are removed."""
    groups.setdefault(key, []).append(one)
    try:
        yield
    finally:
        groups[key].remove(one)
        if not groups[key]:
            del groups[key]
