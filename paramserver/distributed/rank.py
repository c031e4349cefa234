"""One rank of one process group: numbers its collectives, and brings their pieces to the servers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paramserver import errors
from paramserver.distributed.rounds import Exchange, Numbers, pieces, server_of
from paramserver.distributed.servers import Network, Servers
from paramserver.v1 import shard_pb2

# Pieces of collectives on their way. All ranks send them in the same order, so the first one is on its way everywhere.
_WINDOW = 16
_KEY = "paramserver"
_LEAVE_S = 2.0


class Rank:
    """Rank ``rank`` of ``size`` in a group, of which the first rank makes the name and finds the servers.

    ``store``: of torch, by which the ranks know each other. ``timeout_s``: how long a collective waits for all ranks.
    """

    def __init__(self, network: Network, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._network = network
        if rank == 0:
            store.set(_KEY, f"{secrets.token_hex(8)} {network.find().encode()}")
        self._group, _, servers = store.get(_KEY).decode().partition(" ")
        self._servers = Servers.decode(servers)
        self._numbers, self._lock = Numbers(), threading.Lock()
        self._under_way: set[concurrent.futures.Future[list[torch.Tensor]]] = set()
        self._window = asyncio.Semaphore(_WINDOW)
        network.background.run(self._open())

    def exchange(
        self,
        make: Callable[[Numbers], Sequence[Exchange]],
        result: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        timeout_s: float | None = None,
        last: bool = False,
    ) -> concurrent.futures.Future[list[torch.Tensor]]:
        """Begin the exchanges that ``make`` makes; then ``finish``, and the future has ``result``.

        Numbers are taken in the order of the calls. ``last``: the exchanges begin when all earlier collectives of this
        rank are over, messages to single ranks excepted. The error of an earlier one is theirs, too.
        """
        with self._lock:
            exchanges = make(self._numbers)
            earlier = list(self._under_way) if last else []

            async def run() -> list[torch.Tensor]:
                await _over(earlier)
                await _all(self._one(exchange, timeout_s or self.timeout_s) for exchange in exchanges)
                if finish is not None:
                    finish()
                return result

            begun = self._network.background.submit(run())
            if not any(exchange.ranks for exchange in exchanges):
                self._under_way.add(begun)
        begun.add_done_callback(self._under_way.discard)
        return begun

    async def _one(self, exchange: Exchange, timeout_s: float) -> None:
        cut = enumerate(pieces(exchange.nbytes, len(self._servers.addresses)))
        await _all(self._piece(exchange, piece, start, stop, timeout_s) for piece, (start, stop) in cut)
        with self._lock:
            self._numbers.over(exchange.channel, exchange.number)

    async def _piece(self, exchange: Exchange, piece: int, start: int, stop: int, timeout_s: float) -> None:
        # Two messages may be sent in another order than they are received: none of them holds the others up.
        async with contextlib.nullcontext() if exchange.ranks else self._window:
            request = self._request(exchange, timeout_s)
            request.piece, request.bytes = piece, stop - start
            if exchange.give is not None:
                request.data = bytes(exchange.give[start:stop])
            address = self._servers.addresses[server_of(exchange, piece, len(self._servers.addresses))]

            def place(index: int) -> memoryview | None:
                whole = exchange.into.get(index)
                return whole[start:stop] if whole is not None else None

            await self._network.collect(address, request, place)

    def _request(self, exchange: Exchange, timeout_s: float) -> shard_pb2.CollectRequest:
        with self._lock:
            done = self._numbers.done(exchange.channel)
        return shard_pb2.CollectRequest(
            job=self._servers.job,
            group=self._group,
            rank=self.rank,
            size=self.size,
            ranks=exchange.ranks,
            channel=exchange.channel,
            number=exchange.number,
            what=exchange.what,
            reduction=exchange.reduction,  # type: ignore[arg-type]
            dtype=exchange.dtype,
            takes=exchange.takes,
            wait_s=timeout_s,
            done=done,
        )

    async def _open(self) -> None:
        """Open the group at all servers, together with all other ranks."""
        opening = Exchange("opening the process group", "open", 0, 0)

        async def at(address: str) -> None:
            request = self._request(opening, self.timeout_s)
            request.opens = True
            await self._network.collect(address, request, lambda _: None)

        await _all(at(address) for address in self._servers.addresses)

    def leave(self) -> None:
        """This rank brings nothing more. Servers that cannot be reached at once find out by themselves."""
        request = shard_pb2.CollectRequest(job=self._servers.job, group=self._group, rank=self.rank, leaves=True)

        async def go() -> None:
            await _all(self._network.collect(address, request, lambda _: None) for address in self._servers.addresses)

        with contextlib.suppress(errors.ParamServerError):
            self._network.background.run(go(), _LEAVE_S)


async def _over(works: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Wait for all of these, which go on if this wait is given up; raises the first error."""
    waiting = [asyncio.shield(asyncio.wrap_future(one)) for one in works]
    for found in await asyncio.gather(*waiting, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found


async def _all(works: object) -> None:
    """Wait for all; the first error ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]  # type: ignore[attr-defined]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
