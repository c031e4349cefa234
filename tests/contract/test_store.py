"""One suite for every store: in memory, and real servers, entered as the user whom docs/store.md describes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paramserver.errors import FencedError
from paramserver.store import ConflictError, Entry, Lead, Store, open_store
from paramserver.store.memory import MemoryStore
from tests.support.contract.redis_servers import RedisServer, programs, serving

DEADLINE_S = 20.0
SERVERS = sorted(programs())
# Long enough that no lease of a test ends by itself.
TTL_S = 60.0


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Each server program in turn."""
    with serving(programs()[request.param], tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module", params=["memory", *SERVERS])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of each store in turn."""
    if request.param == "memory":
        yield "memory"
        return
    with serving(programs()[request.param], tmp_path_factory.mktemp("store")) as running:
        yield running.url


def run(url: str, job: str, test: Callable[[Store], Awaitable[None]]) -> None:
    """Run ``test`` with the store of a job."""

    async def main() -> None:
        store = open_store(url, f"paramserver:{job}:")
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(store)
        finally:
            await store.close()
            await store.close()

    asyncio.run(main())


# ---- values


def test_a_value_is_kept_with_its_revision(url: str) -> None:
    async def test(store: Store) -> None:
        await store.ping()
        assert await store.load("job") is None
        assert await store.save("job", b"\x00\xff\r\n one", 0) == 1
        assert await store.load("job") == Entry(b"\x00\xff\r\n one", 1)
        assert await store.save("job", b"", 1) == 2
        assert await store.load("job") == Entry(b"", 2)
        assert store.operations == 6

    run(url, "kept", test)


def test_a_save_on_another_revision_changes_nothing(url: str) -> None:
    async def test(store: Store) -> None:
        with pytest.raises(ConflictError, match="revision 0 of the store, not 1"):
            await store.save("job", b"x", 1)
        assert await store.load("job") is None
        await store.save("job", b"x", 0)
        for wrong in (0, 2, 7):
            with pytest.raises(ConflictError, match=f"job is at revision 1 of the store, not {wrong}"):
                await store.save("job", b"y", wrong)
        assert await store.load("job") == Entry(b"x", 1)

    run(url, "compared", test)


def test_the_same_bytes_from_two_writers_are_still_a_conflict(url: str) -> None:
    async def test(store: Store) -> None:
        assert await store.save("job", b"same", 0) == 1
        with pytest.raises(ConflictError):
            await store.save("job", b"same", 0)

    run(url, "same", test)


def test_of_many_writers_one_wins_each_round(url: str) -> None:
    async def test(store: Store) -> None:
        for round_ in range(5):
            writes = [store.save("job", str(writer).encode(), round_) for writer in range(20)]
            results = await asyncio.gather(*writes, return_exceptions=True)
            assert [result for result in results if isinstance(result, int)] == [round_ + 1]
            assert len([result for result in results if isinstance(result, ConflictError)]) == 19

    run(url, "race", test)


def test_a_counter_of_fifty_writers_is_the_number_of_their_successes(url: str) -> None:
    """F11."""
    conflicts = 0

    async def test(store: Store) -> None:
        async def writer() -> None:
            nonlocal conflicts
            for attempt in range(200):
                entry = await store.load("n") or Entry(b"0", 0)
                try:
                    await store.save("n", str(int(entry.value) + 1).encode(), entry.revision)
                    return
                except ConflictError:
                    conflicts += 1
                    await asyncio.sleep(random.uniform(0, 0.002 * attempt))
            raise AssertionError("200 attempts were not enough")

        await asyncio.gather(*(writer() for _ in range(50)))
        assert await store.load("n") == Entry(b"50", 50)

    run(url, "counter", test)
    assert conflicts or url == "memory"  # in memory nothing comes between a load and its save


def test_a_deleted_key_begins_again(url: str) -> None:
    async def test(store: Store) -> None:
        await store.save("job", b"x", 0)
        await store.save("job", b"x", 1)
        await store.delete("job")
        await store.delete("never-there")
        assert await store.load("job") is None
        assert await store.save("job", b"new", 0) == 1

    run(url, "deleted", test)


def test_a_large_value_is_kept(url: str) -> None:
    async def test(store: Store) -> None:
        value = os.urandom(2**22)
        await store.save("big", value, 0)
        assert await store.load("big") == Entry(value, 1)

    run(url, "large", test)


ODD_NAMES = ['"', "'); redis.call('FLUSHALL') --", "a\nb\r\nGET x", "*", "\\", "käse", "{x}", "]]"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_do_no_harm(url: str, name: str) -> None:
    """J11: nothing of a name is ever taken for a command."""

    async def test(store: Store) -> None:
        await store.save("other", b"1", 0)
        assert await store.save(name, name.encode(), 0) == 1
        assert await store.load(name) == Entry(name.encode(), 1)
        assert await store.lead(name, name, TTL_S) == Lead(True, 1, name, TTL_S)
        known = await store.leader()
        assert known is not None
        assert known.holder == name
        await store.delete(name)
        assert await store.load(name) is None
        await store.resign(name)
        assert await store.leader() is None
        assert await store.load("other") == Entry(b"1", 1)

    run(url, f"odd {name}", test)


# ---- leadership


def test_one_leads_and_the_others_learn_who(url: str) -> None:
    async def test(store: Store) -> None:
        assert await store.leader() is None
        assert await store.lead("a", "host-a:1", TTL_S) == Lead(True, 1, "host-a:1", TTL_S)
        for other in (await store.lead("b", "host-b:1", TTL_S), await store.lead("b", "host-b:1", TTL_S, term=1)):
            assert other.leads is False
            assert (other.term, other.holder) == (1, "host-a:1")
            assert TTL_S - 10 < other.left_s <= TTL_S
        known = await store.leader()
        assert known is not None
        assert (known.leads, known.term, known.holder) == (False, 1, "host-a:1")
        assert TTL_S - 10 < known.left_s <= TTL_S

    run(url, "one", test)


def test_a_leader_extends_its_lease_under_its_term(url: str) -> None:
    async def test(store: Store) -> None:
        assert (await store.lead("a", "x", 5.0)).term == 1
        assert await store.lead("a", "x", TTL_S) == Lead(True, 1, "x", TTL_S)
        assert await store.lead("a", "x", TTL_S, term=1) == Lead(True, 1, "x", TTL_S)
        assert await store.lead("a", "y", TTL_S, term=1) == Lead(True, 1, "y", TTL_S)
        known = await store.leader()
        assert known is not None
        assert known.holder == "y"
        assert known.left_s > 10

    run(url, "extends", test)


def test_a_lease_ends_by_itself_and_the_next_term_is_higher(url: str) -> None:
    async def test(store: Store) -> None:
        assert (await store.lead("a", "a", 0.2)).term == 1
        while not (second := await store.lead("b", "b", TTL_S)).leads:
            assert second.holder == "a"
            assert second.left_s <= 0.2
            await asyncio.sleep(0.02)
        assert second.term == 2
        assert (await store.lead("a", "a", TTL_S, term=1)).leads is False

    run(url, "ends", test)


def test_only_its_holder_gives_a_lease_back(url: str) -> None:
    async def test(store: Store) -> None:
        await store.resign("a")
        await store.lead("a", "a", TTL_S)
        await store.resign("b")
        assert (await store.lead("b", "b", TTL_S)).leads is False
        await store.resign("a")
        await store.resign("a")
        assert await store.leader() is None
        assert await store.lead("b", "b", TTL_S) == Lead(True, 2, "b", TTL_S)

    run(url, "resigns", test)


def test_a_new_term_is_above_all_that_are_known(url: str) -> None:
    async def test(store: Store) -> None:
        assert (await store.lead("a", "a", TTL_S, floor=7)).term == 8
        assert (await store.lead("a", "a", TTL_S, floor=7)).term == 8  # the same request again
        assert (await store.lead("a", "a", TTL_S, floor=8)).term == 8  # by now others know of it
        await store.resign("a")
        assert (await store.lead("b", "b", TTL_S, floor=3)).term == 9
        assert (await store.lead("b", "b", TTL_S, floor=20)).term == 21

    run(url, "floor", test)


def test_a_leader_goes_on_after_its_lease_was_lost_unless_there_was_another(url: str) -> None:
    async def test(store: Store) -> None:
        await store.lead("a", "a", TTL_S)
        await store.resign("a")  # as if it had run out
        assert await store.lead("a", "a", TTL_S, term=1) == Lead(True, 1, "a", TTL_S)
        await store.resign("a")
        await store.lead("b", "b", TTL_S)
        await store.resign("b")
        assert await store.lead("a", "a", TTL_S, term=1) == Lead(False, 2, "", 0.0)
        assert await store.leader() is None
        assert await store.lead("a", "a", TTL_S, term=2, floor=3) == Lead(False, 3, "", 0.0)
        assert await store.lead("b", "b", TTL_S, term=2) == Lead(True, 2, "b", TTL_S)

    run(url, "goes-on", test)


def test_a_store_that_forgot_learns_the_term_from_the_leader(url: str) -> None:
    async def test(store: Store) -> None:
        assert await store.lead("a", "a", TTL_S, term=5) == Lead(True, 5, "a", TTL_S)
        assert await store.lead("a", "a", TTL_S, term=6) == Lead(True, 6, "a", TTL_S)
        assert await store.lead("a", "a", TTL_S, term=4) == Lead(True, 6, "a", TTL_S)
        await store.resign("a")
        assert (await store.lead("b", "b", TTL_S)).term == 7

    run(url, "learns", test)


def test_a_store_that_was_set_back_follows_the_leader_of_the_later_term(url: str) -> None:
    async def test(store: Store) -> None:
        await store.lead("a", "a", TTL_S, term=3)  # as the old state has it
        assert await store.lead("b", "b", TTL_S, term=4, floor=5) == Lead(False, 5, "", 0.0)
        assert (await store.leader() or Lead(False, 0, "", 0.0)).holder == "a"
        assert await store.lead("b", "b", TTL_S, term=4) == Lead(True, 4, "b", TTL_S)
        late = await store.lead("a", "a", TTL_S, term=3)
        assert (late.leads, late.term, late.holder) == (False, 4, "b")

    run(url, "set-back", test)


def test_of_many_candidates_one_leads_each_round(url: str) -> None:
    async def test(store: Store) -> None:
        for round_ in range(1, 6):
            leads = await asyncio.gather(*(store.lead(f"t{i}", f"h{i}", TTL_S) for i in range(20)))
            won = [lead for lead in leads if lead.leads]
            assert len(won) == 1
            assert {lead.term for lead in leads} == {round_}
            assert {lead.holder for lead in leads} == {won[0].holder}
            await store.resign("t" + won[0].holder[1:])

    run(url, "candidates", test)


def test_a_leader_of_before_writes_nothing(url: str) -> None:
    async def test(store: Store) -> None:
        await store.lead("a", "a", TTL_S)
        assert await store.save("job", b"a", 0, term=1) == 1
        await store.resign("a")
        await store.lead("b", "b", TTL_S)
        with pytest.raises(FencedError, match="not written for term 1: the store knows term 2"):
            await store.save("job", b"late", 1, term=1)
        with pytest.raises(FencedError):
            await store.save("job", b"late", 7, term=1)  # also where the revision does not fit
        with pytest.raises(FencedError):
            await store.delete("job", term=1)
        assert await store.load("job") == Entry(b"a", 1)
        assert await store.save("job", b"b", 1, term=2) == 2
        assert await store.save("job", b"c", 2, term=3) == 3  # a store that was set back
        assert await store.save("job", b"d", 3) == 4
        await store.delete("job", term=2)
        assert await store.load("job") is None

    run(url, "fenced", test)


# ---- all stores alike


@pytest.mark.parametrize("seed", range(8))
def test_a_server_does_what_memory_does(server: RedisServer, seed: int) -> None:
    """The same random operations on both; the answers are equal, times aside."""
    chance = random.Random(seed)

    def operation() -> tuple[str, tuple[object, ...]]:
        name = chance.choice(["save", "save", "load", "delete", "lead", "lead", "lead", "resign", "leader", "expire"])
        key, term = chance.choice("xy"), chance.choice([0, 0, 1, 2, 3, 5, 8])
        if name == "save":
            return name, (key, bytes([chance.randrange(256)]), chance.randrange(4), term)
        if name == "delete":
            return name, (key, term)
        if name == "lead":
            return name, (chance.choice("abc"), chance.choice("hi"), TTL_S, term, chance.choice([0, 0, 1, 4]))
        if name == "resign":
            return name, (chance.choice("abc"),)
        return name, (key,) if name == "load" else ()

    async def answer(store: Store, name: str, arguments: tuple[object, ...]) -> object:
        try:
            result = await getattr(store, name)(*arguments)
        except (ConflictError, FencedError) as error:
            return str(error)
        return replace(result, left_s=result.left_s > 0) if isinstance(result, Lead) else result

    async def test(store: Store) -> None:
        now = 0.0
        memory = MemoryStore(lambda: now)
        seen = set()
        with server.admin() as admin:
            for step in range(400):
                name, arguments = operation()
                if name == "expire":
                    now += 2 * TTL_S
                    admin.delete(f"paramserver:model-{seed}:leader")
                    continue
                expected = await answer(memory, name, arguments)
                assert await answer(store, name, arguments) == expected, (step, name, arguments)
                seen.add((name, type(expected)))
        assert len(seen) == 10  # every operation, with every kind of answer it has

    run(server.url, f"model-{seed}", test)


def test_two_jobs_do_not_touch_each_other(server: RedisServer) -> None:
    """F14."""
    before = server.all_keys()

    async def main() -> None:
        jobs = ["a", "a.b", "a-b", "A", "aa"]
        stores = [open_store(server.url, f"paramserver:{job}:") for job in jobs]
        try:
            for number, store in enumerate(stores):
                assert await store.load("state") is None
                assert await store.save("state", jobs[number].encode(), 0) == 1
                assert await store.lead(f"token-{number}", jobs[number], TTL_S, floor=number) == Lead(
                    True, number + 1, jobs[number], TTL_S
                )
            await stores[0].delete("state")
            await stores[0].resign("token-1")
            await stores[0].resign("token-0")
            for number, store in enumerate(stores[1:], 1):
                assert await store.load("state") == Entry(jobs[number].encode(), 1)
                leader = await store.leader()
                assert leader is not None
                assert (leader.term, leader.holder) == (number + 1, jobs[number])
        finally:
            for store in stores:
                await store.close()

    asyncio.run(main())
    mine = [key for key in server.all_keys() if key not in before]
    assert sorted(mine) == sorted(
        ["paramserver:a:term"]
        + [f"paramserver:{job}:{key}" for job in ("a.b", "a-b", "A", "aa") for key in ("entry:state", "leader", "term")]
    )


def test_the_password_may_come_from_a_file(server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(server.password + "\n")
    path.chmod(0o600)

    async def main() -> None:
        store = open_store(server.url_without_password, "paramserver:file:", str(path))
        try:
            await store.ping()
        finally:
            await store.close()

    asyncio.run(main())
