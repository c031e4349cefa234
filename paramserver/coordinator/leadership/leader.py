"""The election of the coordinator that leads the job: a lease in the store, with a number (*term*).

Servers and the store refuse coordinators with a lower term. A leader that cannot reach the store goes on: no other
process can become leader there either. It stops when it learns of a higher term, from the store or from a server. A
leader that was paused finds its lease run out, and asks the store before it decides anything
(:meth:`Leadership.confirm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable

import structlog

from paramserver import errors
from paramserver.coordinator.tasks import Tasks
from paramserver.store.base import Lead, Store
from paramserver.transport.security.fields import MAX_CLAIM

log = structlog.get_logger("paramserver.coordinator")


class Leadership:
    """A coordinator's bid for the lease. ``holder`` is its address, shown to others; ``ttl_s`` how long a lease lasts.

    ``token``: secret name of this bid, made up if empty. ``former``: the token of a coordinator that is known to have
    ended, so that nobody waits for its lease.
    """

    def __init__(self, store: Store, holder: str, ttl_s: float, token: str = "", former: str = "") -> None:
        self.term = 0
        self._store = store
        self._holder = holder
        self._ttl_s = ttl_s
        self._token = token or secrets.token_hex(8)
        self._former = former
        self._tasks = Tasks()
        # Until when no other coordinator can lead (monotonic seconds), by the last answer of the store.
        self._sure_until = 0.0
        self._replaced: Callable[[str], Awaitable[None]] | None = None

    async def acquire(self, floor: int = 0) -> Lead:
        """Become leader if there is none, under a term above ``floor``. Raises StoreError."""
        if self._former:
            await self._store.resign(self._former)
        asked_at = time.monotonic()
        lead = await self._store.lead(self._token, self._holder, self._ttl_s, floor=floor)
        if lead.leads:
            self.term = lead.term
            self._sure_until = asked_at + self._ttl_s
        if lead.term > MAX_CLAIM:
            raise errors.ConfigError(
                f"the store says that {lead.term} coordinators have led this job, which cannot be: somebody wrote "
                "a wrong number; choose another name with --job, or delete the keys of this job in the store"
            )
        return lead

    async def _renew(self) -> bool:
        """Renew the lease; False if another coordinator leads now. Raises StoreError."""
        asked_at = time.monotonic()
        lead = await self._store.lead(self._token, self._holder, self._ttl_s, self.term)
        if lead.leads:
            self._sure_until = asked_at + self._ttl_s
        elif self._replaced is not None:
            await self._replaced(f"another coordinator leads the job now (term {lead.term}, at {lead.holder or '?'})")
        return lead.leads

    async def confirm(self) -> None:
        """Raise NotLeaderError if the store says that another coordinator leads. No answer of the store is no error."""
        if time.monotonic() < self._sure_until:
            return
        try:
            leads = await self._renew()
        except errors.StoreError:
            self._sure_until = time.monotonic() + self._ttl_s / 3  # asked again then
            return
        if not leads:
            raise errors.NotLeaderError("this coordinator was replaced by another one")

    async def outranked(self) -> bool:
        """Whether another coordinator leads by now: the store is asked. One that is away does not deny it."""
        try:
            return not await self._renew()
        except errors.StoreError:
            return True

    def keep(
        self,
        renewed: Callable[[], Awaitable[None]],
        replaced: Callable[[str], Awaitable[None]],
        away: Callable[[str], None],
    ) -> None:
        """Renew the lease from now on. ``renewed`` is awaited after each success, ``replaced`` once, with a reason.

        ``away`` is called with the error of a store that is away, and with "" when it is back.
        """
        self._replaced = replaced
        self._tasks.begin(self._keep(renewed, away))

    async def _keep(self, renewed: Callable[[], Awaitable[None]], away: Callable[[str], None]) -> None:
        away_since: float | None = None
        # Runs beside the next renewals, which must not wait for a slow store.
        after: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                if not await self._renew():
                    return
            except errors.StoreError as error:
                if away_since is None:
                    away_since = time.monotonic()
                    log.warning("the store is away; the job goes on", error=str(error))
                    away(str(error))
                continue
            if after is None or after.done():
                after = self._tasks.begin(self._then(renewed))
            if away_since is not None:
                log.info("the store is back", after_s=round(time.monotonic() - away_since, 1))
                away_since = None
                away("")

    async def _then(self, renewed: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(errors.StoreError):
            await renewed()

    async def resign(self) -> None:
        """Give the lease up, so that another coordinator can lead at once. A store that is away is no error."""
        await self._tasks.close()
        if self.term:
            try:
                async with asyncio.timeout(2.0):
                    await self._store.resign(self._token)
            except (errors.StoreError, TimeoutError):
                pass  # the lease ends by itself
