"""A coordinator that does not lead yet waits for the store, and for the end of another coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from paramserver import errors
from paramserver.config import Settings
from paramserver.coordinator.endpoint import Endpoint
from paramserver.coordinator.leadership.journal import recorded_term
from paramserver.coordinator.leadership.leader import Leadership
from paramserver.resume.resuming import Resuming
from paramserver.store.base import Lead, Store

log = structlog.get_logger("paramserver.coordinator")

_SAY_S = 5.0
_RETRY_S = 0.5


class Standby:
    """A coordinator that wants to lead. ``stands_by``: it waits for another one that leads already.

    ``where`` names the store; ``say`` prints a line for people.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: Settings,
        stands_by: bool,
        resuming: Resuming,
        where: str,
        say: Callable[[str], None],
    ) -> None:
        self._endpoint, self._settings, self._stands_by = endpoint, settings, stands_by
        self._resuming, self._store_name, self._say = resuming, where, say
        # The warnings about the store that were given.
        self._warned: set[str] = set()

    async def wait(self, store: Store, leadership: Leadership, address: str) -> bool:
        """Return when this coordinator, at ``address``, leads: True if it has waited for another one's end."""
        started = said = time.monotonic()
        limit = self._settings.cluster.join_timeout_s if self._stands_by else 0.0
        stood_by = away = held = False
        hold_until = 0.0
        while True:
            try:
                facts = await store.inspect()
                if away:
                    # The leader may have missed the store, too: it may renew its lease first.
                    away, hold_until = False, time.monotonic() + self._settings.cluster.lease_s
                if stood_by and time.monotonic() < hold_until:
                    await asyncio.sleep(_RETRY_S)
                    continue
                if facts.refusal:
                    raise errors.ConfigError(f"the store at {self._store_name} cannot be used: {facts.refusal}")
                for warning in facts.warnings:
                    if warning not in self._warned:
                        self._warned.add(warning)
                        log.warning(warning)
                if stood_by and not held and await store.leader() is None:
                    held = True
                    if await recorded_term(store) < self._resuming.floor:
                        log.warning("the store has forgotten the leader of the job; the leader may write it again")
                        hold_until = time.monotonic() + self._settings.cluster.lease_s
                        continue
                acquired = await leadership.acquire(self._resuming.floor)
            except errors.StoreError as error:
                away = True
                self._endpoint.doing = "waits for the store"
                if time.monotonic() - started >= limit:
                    raise
                lead: Lead | None = None
                waiting = f"the store: {error}"
            else:
                lead = acquired
                if acquired.leads:
                    return stood_by
                if not self._stands_by:
                    raise errors.ConfigError(
                        f"job {self._settings.cluster.job!r} is led by a coordinator at {acquired.holder} already: "
                        "choose another name with --job"
                    )
                if not stood_by:
                    self._say(
                        f"standing by at {address} for the coordinator of job {self._endpoint.job} at {acquired.holder}"
                    )
                stood_by, held = True, False
                self._resuming.floor = max(self._resuming.floor, acquired.term)
                waiting = f"the coordinator at {acquired.holder} (term {acquired.term}), for which this one stands by"
                self._endpoint.doing = f"stands by for the one at {acquired.holder}"
                started = time.monotonic()
            if time.monotonic() - said >= _SAY_S:
                said = time.monotonic()
                log.info(f"waiting for {waiting}")
            await asyncio.sleep(min(_RETRY_S, lead.left_s + 0.01) if lead is not None else _RETRY_S)
