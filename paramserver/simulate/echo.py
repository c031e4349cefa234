"""The other process of a calibration: takes pushes, answers pulls with as many bytes, until its input ends.
The process answers each line of its input with the processor seconds that it has used.

python -m paramserver.simulate.echo
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from paramserver.errors import ProtocolError
from paramserver.frames import AnyFrame, Frame
from paramserver.tensors.codec import chunk_frames, split_frame
from paramserver.transport.grpc import serve
from paramserver.v1 import shard_pb2

CHUNK_BYTES, CHUNKS = 4 << 20, 16
# Bytes of one push or pull.
NBYTES = CHUNK_BYTES * CHUNKS

_PAYLOAD = bytes(CHUNK_BYTES)


def frames_of(first: shard_pb2.PushHeader | shard_pb2.PullHeader, chunks: int) -> Iterator[Frame]:
    """The frames of a contribution, or of a version, of so many chunks."""
    refs = (shard_pb2.ChunkRef(index=index, bytes=CHUNK_BYTES) for index in range(chunks))
    return chunk_frames(first, ((ref, _PAYLOAD) for ref in refs))


class Echo:
    """Calls of a shard without a shard. Calls that are not measured fail."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []

    def __getattr__(self, name: str) -> Any:
        return _unknown

    async def push(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.PushResponse:
        """Take a contribution: read its frames."""
        async for raw in frames:
            split_frame(raw)
        return shard_pb2.PushResponse()

    async def pull(self, request: shard_pb2.PullRequest) -> AsyncIterator[AnyFrame]:
        """Give a version, encoded once, or a header alone."""
        if request.header_only:
            yield next(frames_of(shard_pb2.PullHeader(ready=True), 0))
            return
        if not self._frames:
            self._frames = list(frames_of(shard_pb2.PullHeader(ready=True, chunks=CHUNKS), CHUNKS))
        for frame in self._frames:
            yield frame


async def _unknown(_: object) -> NoReturn:
    raise ProtocolError("this process only helps to measure")


async def _main() -> None:
    server = await serve([("Shard", Echo())])
    print(server.address, flush=True)
    while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        print(time.process_time(), flush=True)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(_main())
