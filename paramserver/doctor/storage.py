"""The store, if this machine's settings name a store: on the coordinator's machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paramserver.config import Settings
from paramserver.doctor.finding import Finding, Level, clean, sentence
from paramserver.errors import ParamServerError

if TYPE_CHECKING:
    from paramserver.store.base import StoreFacts


async def look_at_store(settings: Settings) -> list[Finding]:
    """Ask the store in cluster.store for its kind, version and settings."""
    from paramserver.store import open_store

    url = settings.cluster.store
    if "://" not in url:
        value = "not configured here: only the coordinator needs it" if url == "auto" else "in the coordinator's memory"
        return [Finding("store", Level.NOTE, value)]
    try:
        store = open_store(url, "paramserver:doctor:", settings.cluster.store_password_file)
        try:
            await store.ping()
            return check_store(await store.inspect())
        finally:
            await store.close()
    except ParamServerError as error:
        return [sentence("store", Level.FAIL, str(error), "correct cluster.store, or start the store there")]


def check_store(facts: StoreFacts) -> list[Finding]:
    """The facts of the store, and a line for each setting that may lose the job's state."""
    parts = [f"{facts.kind} {facts.version}".strip()]
    if facts.maxmemory_policy:
        limit = f"{facts.maxmemory_bytes >> 20} MiB" if facts.maxmemory_bytes else "no limit"
        parts.append(f"memory: {limit}, {facts.maxmemory_policy}")
    if facts.persistence is not None:
        parts.append("writes every change to disk" if facts.persistence else "does not write every change to disk")
    if facts.clock_offset_s is not None:
        parts.append(f"clock {facts.clock_offset_s:+.3f} s from ours")
    well = Finding("store", Level.OK, clean(", ".join(parts)))
    first = sentence("store", Level.FAIL, facts.refusal) if facts.refusal else well
    return [first, *(sentence("store", Level.WARN, warning) for warning in facts.warnings)]
