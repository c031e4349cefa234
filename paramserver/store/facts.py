"""A server's answer to INFO, judged: warnings about the server, and reasons not to use it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paramserver.store.base import StoreFacts

# The lowest patch release of each line that has the fixes of these flaws of the Lua interpreter. Lines after the last
# line of the table had the fixes from their beginning.
FLAWS = "CVE-2025-49844, CVE-2025-46817 and CVE-2025-46818"
FIXED: dict[str, dict[tuple[int, int], int]] = {
    "redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
# A line that came out before the fixes and is not in the table ends here.
_LAST = {"redis": (8, 2), "valkey": (8, 9)}
MAX_CLOCK_OFFSET_S = 2.0


def judge(info: Mapping[str, object] | None, clock_offset_s: float | None, where: str) -> StoreFacts:
    """``info``: fields of INFO, None if it may not be asked. ``where``: the server, for the sentences."""
    warnings = []
    if clock_offset_s is not None and abs(clock_offset_s) > MAX_CLOCK_OFFSET_S:
        warnings.append(
            f"the clock of the store at {where} differs from ours by {abs(clock_offset_s):.0f} s: set both by NTP"
        )
    if info is None:
        warnings.append(
            f"the store at {where} does not tell its version and settings: allow this user INFO, or check yourself "
            "that it evicts nothing and writes to disk"
        )
        return StoreFacts("redis", clock_offset_s=clock_offset_s, warnings=warnings)
    valkey = "valkey_version" in info or info.get("server_name") == "valkey"
    kind = "valkey" if valkey else "redis"
    version = str(info.get("valkey_version" if valkey else "redis_version", ""))
    if not has_fixes(kind, version):
        lowest = ", ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in FIXED[kind].items())
        warnings.append(
            f"the store at {where} is {kind.capitalize()} {version or '(unknown version)'}, older than the fixes of "
            f"{FLAWS}, by which any user who may run scripts can take over the server: update to {lowest} or later, "
            "unless your distribution has added the fixes"
        )
    persistence = None if "aof_enabled" not in info else bool(_number(info, "aof_enabled"))
    if persistence is False:
        warnings.append(
            f"the store at {where} does not write every change to disk, so it comes back without the last ones, or "
            "empty: set appendonly yes"
        )
    maxmemory, policy = _number(info, "maxmemory"), str(info.get("maxmemory_policy", ""))
    refusal = ""
    if maxmemory and policy not in ("", "noeviction"):
        refusal = (
            f"the store at {where} removes keys when it is full (maxmemory-policy {policy}), and those of the job may "
            "be among them: set maxmemory-policy noeviction"
        )
    elif info.get("role") in ("slave", "replica"):
        refusal = f"the store at {where} is a replica and takes no writes: point cluster.store to the primary"
    return StoreFacts(kind, version, maxmemory, policy, persistence, clock_offset_s, warnings, refusal)


def has_fixes(kind: str, version: str) -> bool:
    """Whether this release has the fixes of FLAWS. Unknown versions count as without fixes."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return False
    major, minor, patch = (int(number) for number in match.groups())
    lowest = FIXED[kind].get((major, minor))
    return patch >= lowest if lowest is not None else (major, minor) > _LAST[kind]


def _number(info: Mapping[str, object], name: str) -> int:
    value = info.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0
