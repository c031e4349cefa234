"""Members: numbers that are never used again, leases by the clock of whoever asks, generations that only rise."""

from __future__ import annotations

import random

import pytest

from paramserver.core.job.membership import (
    Admitted,
    Disconnected,
    Effect,
    GenerationRose,
    Joined,
    Left,
    Member,
    Membership,
    Presence,
    Removed,
    Renewed,
    Role,
    Tick,
)

LEASE_S, GRACE_S = 5.0, 1.0
WORKER = Joined(Role.WORKER)


@pytest.fixture
def members() -> Membership:
    return Membership(LEASE_S, GRACE_S)


def admitted(effects: list[Effect]) -> Member:
    assert isinstance(effects[0], Admitted)
    return effects[0].member


def test_a_newcomer_gets_a_number_a_rank_and_a_lease(members: Membership) -> None:
    member = Member(1, Role.WORKER, 0, "worker-0", expires_at=15.0, address="here:1", pid=7)
    assert members.handle(Joined(Role.WORKER, address="here:1", pid=7), now=10.0) == [
        Admitted(member),
        GenerationRose(1, "worker-0 joined"),
    ]
    assert 1 in members
    assert members.get(1) == member


def test_ranks_are_filled_up_and_numbers_are_never_used_again(members: Membership) -> None:
    for _ in range(3):
        members.handle(WORKER, 0.0)
    assert members.handle(Left(2), 1.0) == [
        Removed(Member(2, Role.WORKER, 1, "worker-1", 5.0), False, "worker-1 left"),
        GenerationRose(4, "worker-1 left"),
    ]
    newcomer = admitted(members.handle(WORKER, 2.0))
    assert (newcomer.ident, newcomer.index) == (4, 1)
    assert [member.ident for member in members.of(Role.WORKER)] == [1, 4, 3]
    assert members.get(2) is None


def test_roles_count_apart_and_a_wish_is_granted_if_it_is_free(members: Membership) -> None:
    assert admitted(members.handle(Joined(Role.SERVER, 2), 0.0)).name == "server-2"
    assert admitted(members.handle(Joined(Role.SERVER, 2), 0.0)).name == "server-0"
    assert admitted(members.handle(Joined(Role.WORKER, 2), 0.0)).name == "worker-2"


def test_workers_of_one_host_have_neighbouring_places(members: Membership) -> None:
    """Ranks are given in the order of arrival, and workers of unknown hosts stay where they are."""
    for host in ("b", "", "a", "b", "a", ""):
        members.handle(Joined(Role.WORKER, host=host), 0.0)
    members.handle(Joined(Role.SERVER), 0.0)
    assert [(member.index, member.host) for member in members.by_place()] == [
        (0, "b"),
        (3, "b"),
        (1, ""),
        (2, "a"),
        (4, "a"),
        (5, ""),
    ]
    members.handle(Left(1), 1.0)
    assert [member.index for member in members.by_place()] == [1, 2, 4, 3, 5]


def test_how_long_a_member_was_silent(members: Membership) -> None:
    ident = admitted(members.handle(WORKER, now=10.0)).ident
    assert members.silent_s(ident, 12.5) == 2.5
    members.handle(Renewed(ident), now=12.5)
    assert members.silent_s(ident, 13.0) == 0.5
    members.handle(Tick(stalled_s=3.0), now=15.5)
    assert members.silent_s(ident, 15.5) == 0.0, "the coordinator has not read what came meanwhile"


def test_a_lease_ends_unless_it_is_renewed(members: Membership) -> None:
    """1. Two join; 2. one is heard of; 3. the other one's lease ends, to the moment."""
    members.handle(WORKER, 0.0)
    members.handle(WORKER, 0.0)
    assert members.handle(Renewed(1), 4.0) == []
    assert members.handle(Tick(), 4.999) == []
    reason = "worker-1 was not heard of until its lease ended"
    assert members.handle(Tick(), 5.0) == [
        Removed(Member(2, Role.WORKER, 1, "worker-1", 5.0), True, reason),
        GenerationRose(3, reason),
    ]
    assert members.handle(Tick(), 8.999) == []
    assert len(members.handle(Tick(), 9.0)) == 2


def test_no_lease_ends_while_the_coordinator_could_not_hear(members: Membership) -> None:
    members.handle(WORKER, 0.0)
    members.handle(WORKER, 0.0)
    members.handle(Disconnected(2), 1.0)
    assert members.handle(Tick(stalled_s=10.0), 11.0) == []
    members.handle(Renewed(2), 11.5)
    assert members.handle(Tick(), 14.999) == []
    assert [e.member.ident for e in members.handle(Tick(), 15.0) if isinstance(e, Removed)] == [1]


def test_several_losses_are_one_generation(members: Membership) -> None:
    members.handle(WORKER, 0.0)
    members.handle(WORKER, 1.0)
    *removed, rose = members.handle(Tick(), 60.0)
    assert [type(effect) for effect in removed] == [Removed, Removed]
    assert isinstance(rose, GenerationRose)
    assert rose.generation == 3
    assert "worker-0" in rose.reason
    assert "worker-1" in rose.reason
    assert members.handle(Tick(), 61.0) == []


def test_a_broken_session_has_a_grace_period(members: Membership) -> None:
    """Shorter than the lease, never longer; a sign of life within it is as if nothing had been."""
    members.handle(WORKER, 0.0)
    assert members.handle(Disconnected(1), 1.0) == []
    member = members.get(1)
    assert member is not None
    assert (member.presence, member.expires_at) == (Presence.SILENT, 2.0)
    members.handle(Renewed(1), 1.5)
    member = members.get(1)
    assert member is not None
    assert (member.presence, member.expires_at) == (Presence.CONNECTED, 6.5)
    members.handle(Disconnected(1), 6.0)
    assert members.handle(Tick(), 6.499) == []
    # The lease ends before the grace period.
    assert len(members.handle(Tick(), 6.5)) == 2


def test_strangers_change_nothing(members: Membership) -> None:
    """Messages of members that are gone come late: they are not revived."""
    for event in (Renewed(9), Disconnected(9), Left(9)):
        assert members.handle(event, 0.0) == []
    members.handle(WORKER, 0.0)
    members.handle(Left(1), 0.0)
    assert members.handle(Renewed(1), 0.0) == []
    assert 1 not in members
    assert members.generation == 2


def test_observers_are_of_no_generation(members: Membership) -> None:
    observer = admitted(members.handle(Joined(Role.OBSERVER), 0.0))
    assert members.generation == 0
    effects = members.handle(Left(observer.ident), 1.0)
    assert effects == [Removed(observer, False, "observer-0 left")]


def test_a_journal_sets_where_numbers_go_on() -> None:
    """No generation and no number is used twice across restarts of the coordinator."""
    members = Membership(LEASE_S, GRACE_S, generation=7, next_ident=40)
    assert members.handle(WORKER, 0.0)[1] == GenerationRose(8, "worker-0 joined")
    assert 40 in members


@pytest.mark.parametrize(("lease_s", "grace_s"), [(0.0, 1.0), (5.0, 0.0), (-1.0, 1.0)])
def test_leases_must_last(lease_s: float, grace_s: float) -> None:
    with pytest.raises(ValueError, match=r"lease_s \(.*\) and grace_s \(.*\) must be above 0"):
        Membership(lease_s, grace_s)


def test_random_events_keep_the_rules() -> None:
    """Generations rise one by one, only when workers or servers change; no rank is held twice; nothing outlives its
    lease."""
    rng = random.Random(1)
    for _ in range(50):
        members, now, generation = Membership(LEASE_S, GRACE_S), 0.0, 0
        for _ in range(60):
            now += rng.choice((0.0, 0.1, 1.0, 3.0))
            ident = rng.randrange(1, 20)
            join = Joined(rng.choice(list(Role)), rng.choice((None, 0, 1, 5)))
            before = set(members.of(Role.WORKER) + members.of(Role.SERVER))
            event = rng.choice((join, Renewed(ident), Disconnected(ident), Left(ident), Tick()))
            effects = members.handle(event, now)
            after = set(members.of(Role.WORKER) + members.of(Role.SERVER))
            changed = {member.ident for member in before} != {member.ident for member in after}
            generation += changed
            assert members.generation == generation
            assert sum(isinstance(effect, GenerationRose) for effect in effects) == changed
            for role in Role:
                ranks = [member.index for member in members.of(role)]
                assert len(set(ranks)) == len(ranks)
            if isinstance(event, Tick):
                assert all(member.expires_at > now for member in after)
