"""Which stranger gives way when there are too many of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramserver.core.crowd import Crowd
from paramserver.transport.addresses import network_of


def test_there_is_room_until_there_are_too_many() -> None:
    crowd = Crowd(16)
    assert [crowd.come(key, "flood") for key in range(16)] == [None] * 16
    assert crowd.come(16, "flood") == 0
    assert crowd.come(17, "flood") == 1
    assert len(crowd) == 16


def test_the_address_with_the_most_strangers_gives_way_to_the_others() -> None:
    crowd = Crowd(16)
    for key in range(16):
        crowd.come(key, "flood")
    assert [crowd.come(key, f"member-{key}") for key in (100, 101)] == [0, 1]
    assert 100 in crowd
    assert 101 in crowd


def test_members_that_begin_at_the_same_time_do_not_push_each_other_out() -> None:
    """The oldest of them is about to show its token."""
    crowd = Crowd(16)
    for key in range(16):
        crowd.come(key, f"machine-{key % 8}")
    assert crowd.come(16, "machine-9") == 16
    assert 16 not in crowd


def test_who_has_shown_a_token_is_no_stranger() -> None:
    crowd = Crowd(2)
    crowd.come(1, "a")
    crowd.gone(1)
    crowd.gone(1)
    assert crowd.come(2, "a") is None
    assert crowd.come(3, "a") is None
    crowd.keep({3})
    assert (2 in crowd, 3 in crowd, crowd.oldest(), crowd.oldest()) == (False, True, 3, None)


@given(st.lists(st.tuples(st.sampled_from("abcdefghij"), st.booleans())), st.integers(1, 20))
def test_there_are_never_more_than_the_limit_and_never_two_answers(arrivals: list[tuple[str, bool]], most: int) -> None:
    crowd, present = Crowd(most), set()
    for key, (address, leaves) in enumerate(arrivals):
        out = crowd.come(key, address)
        present.add(key)
        if out is not None:
            present.remove(out)
        if leaves and present:
            crowd.gone(min(present))
            present.remove(min(present))
        assert len(crowd) == len(present) <= most
        assert all(key in crowd for key in present)


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("fe80::1%eth0") == "fe80::/64"
