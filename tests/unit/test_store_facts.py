"""What is made of a server's answers to INFO."""

from __future__ import annotations

import pytest

from paramserver.store.facts import has_fixes, judge

GOOD: dict[str, object] = {
    "redis_version": "8.2.2",
    "role": "master",
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
}


@pytest.mark.parametrize(
    "version",
    ["6.2.20", "6.2.21", "7.2.11", "7.4.6", "8.0.4", "8.2.2", "8.2.10", "8.4.0", "9.0.0", "10.0.0"],
)
def test_redis_with_the_fixes(version: str) -> None:
    """J13."""
    assert has_fixes("redis", version)
    assert judge({**GOOD, "redis_version": version}, 0.0, "x").warnings == []


@pytest.mark.parametrize(
    "version",
    ["", "?", "8", "2.8.24", "5.0.14", "6.0.20", "6.2.19", "7.0.15", "7.2.10", "7.4.5", "8.0.3", "8.1.9", "8.2.1"],
)
def test_redis_without_them(version: str) -> None:
    """J13."""
    assert not has_fixes("redis", version)
    [warning] = judge({**GOOD, "redis_version": version}, 0.0, "redis://x").warnings
    assert "the store at redis://x is Redis" in warning
    assert "CVE-2025-49844, CVE-2025-46817 and CVE-2025-46818" in warning
    assert "update to 6.2.20, 7.2.11, 7.4.6, 8.0.4, 8.2.2 or later" in warning


def test_valkey_has_versions_of_its_own() -> None:
    """It also says which Redis it is compatible with; that does not count."""
    for version in ("7.2.11", "8.0.6", "8.1.4", "9.0.0", "9.1.2"):
        facts = judge({**GOOD, "redis_version": "7.2.4", "server_name": "valkey", "valkey_version": version}, 0.0, "x")
        assert (facts.kind, facts.version, facts.warnings) == ("valkey", version, [])
    # 8.9.2xx are the release candidates of 9.0.
    for version in ("7.2.10", "8.0.5", "8.1.3", "8.9.240"):
        facts = judge({**GOOD, "redis_version": "7.2.4", "valkey_version": version}, 0.0, "x")
        assert "is Valkey" in facts.warnings[0]
        assert "update to 7.2.11, 8.0.6, 8.1.4 or later" in facts.warnings[0]


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru", "volatile-ttl"])
def test_eviction_is_refused_only_with_a_limit(policy: str) -> None:
    info = {**GOOD, "maxmemory_policy": policy}
    assert judge(info, 0.0, "x").refusal == ""
    facts = judge({**info, "maxmemory": 1000}, 0.0, "x")
    assert facts.maxmemory_bytes == 1000
    assert policy in facts.refusal
    assert judge({**GOOD, "maxmemory": 1000}, 0.0, "x").refusal == ""


def test_persistence_and_role() -> None:
    assert judge(GOOD, 0.0, "x").persistence is True
    off = judge({**GOOD, "aof_enabled": 0}, 0.0, "x")
    assert off.persistence is False
    assert "appendonly yes" in off.warnings[0]
    unknown = judge({name: value for name, value in GOOD.items() if name != "aof_enabled"}, 0.0, "x")
    assert (unknown.persistence, unknown.warnings) == (None, [])
    assert "point cluster.store to the primary" in judge({**GOOD, "role": "slave"}, 0.0, "x").refusal


def test_a_clock_that_is_off() -> None:
    for offset_s in (-7.0, 7.0):
        facts = judge(GOOD, offset_s, "x")
        assert facts.clock_offset_s == offset_s
        assert "differs from ours by 7 s" in facts.warnings[0]
    assert judge(GOOD, 1.0, "x").warnings == judge(GOOD, None, "x").warnings == []


def test_an_answer_that_is_not_given() -> None:
    facts = judge(None, None, "x")
    assert (facts.version, facts.persistence, facts.refusal) == ("", None, "")
    assert "allow this user INFO" in facts.warnings[0]


def test_an_answer_in_which_nothing_is_as_expected() -> None:
    facts = judge({"maxmemory": "much", "maxmemory_policy": 3, "role": None, "redis_version": 7}, None, "x")
    assert (facts.kind, facts.maxmemory_bytes, facts.refusal) == ("redis", 0, "")
