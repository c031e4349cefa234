"""The seats of servers: every transition, every answer to a newcomer, and random sequences of events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from paramserver.core.job.membership import (
    Admitted,
    Ended,
    Joined,
    Left,
    Member,
    Membership,
    Removed,
    Renewed,
    Role,
)
from paramserver.core.job.seats import (
    Answer,
    Away,
    Back,
    Drop,
    Effect,
    Facts,
    Gone,
    JobFails,
    Missed,
    Newcomer,
    Seat,
    Seats,
    Stranger,
    Taken,
    TooMany,
    TryAgain,
)

# A job of two servers: before there is a model, with a model, and with a checkpoint to go back to.
EARLY = Facts("test", servers=2, timeline=2)
MODEL = replace(EARLY, layout="digest")
SAFE = replace(MODEL, can_go_back=True)


@dataclass
class Job:
    """As much of a coordinator as it takes to carry out what the seats decide."""

    facts: Facts = MODEL
    members: Membership = field(default_factory=lambda: Membership(lease_s=5.0, grace_s=1.0))
    now: float = 10.0

    def __post_init__(self) -> None:
        self.seats = Seats(self.members)

    def asks(self, wish: int | None = None, incarnation: int = 77, **shard: object) -> Answer:
        """A newcomer asks for a seat; if it gets one, it becomes a member there."""
        newcomer = Newcomer(wish, incarnation, **shard)  # type: ignore[arg-type]
        answer = self.seats.place(newcomer, self.facts)
        if isinstance(answer, Seat):
            self.seats.handle(Taken(answer.index, with_shard=bool(newcomer.holds)), self.now)
            effects = self.members.handle(Joined(Role.SERVER, answer.index, incarnation=incarnation), self.now)
            (member,) = [effect.member for effect in effects if isinstance(effect, Admitted)]
            assert member.index == answer.index, "the seat was free"
            self.members.handle(Renewed(member.ident), self.now)
        return answer

    def goes(self, index: int, lost: bool = True) -> list[Effect]:
        """The server at ``index`` leaves or is lost."""
        server = self.seats.seat(index)
        assert isinstance(server, Member)
        effects = self.members.handle(Ended(server.ident) if lost else Left(server.ident), self.now)
        (gone,) = [effect for effect in effects if isinstance(effect, Removed)]
        return self.seats.handle(Gone(gone.member, gone.lost, gone.reason, self.facts), self.now)


def full(facts: Facts = MODEL, workers: int = 1) -> Job:
    """A job with its two servers, which have the incarnations 100 and 101, and with a worker."""
    job = Job(EARLY)
    assert [job.asks(incarnation=100), job.asks(incarnation=101)] == [Seat(0), Seat(1)]
    for _ in range(workers):
        job.members.handle(Joined(Role.WORKER), job.now)
    job.facts = facts
    return job


def waiting(facts: Facts = MODEL, *away: int) -> Job:
    """The same, but the servers ``away`` have been lost one second ago."""
    job = full(facts)
    for index in away:
        job.goes(index)
    job.now += 1.0
    return job


def who(job: Job, index: int) -> int | str:
    """The incarnation of the server that sits there, "away", or "free"."""
    match job.seats.seat(index):
        case Member() as member:
            return member.incarnation
        case Away():
            return "away"
    return "free"


# ---- servers that go


@pytest.mark.parametrize(
    ("facts", "lost", "workers", "then", "fails"),
    [
        (EARLY, True, 1, "free", False),
        (EARLY, False, 1, "free", False),
        (MODEL, True, 1, "away", False),
        (MODEL, True, 0, "away", False),
        (MODEL, False, 1, "free", True),
        (MODEL, False, 0, "free", False),
        (SAFE, True, 1, "away", False),
        (SAFE, False, 1, "away", False),
        (SAFE, False, 0, "away", False),
        (replace(SAFE, over=True), True, 0, "away", False),
        (replace(SAFE, over=True), False, 0, "free", False),
        (replace(SAFE, over=True), False, 1, "free", True),
    ],
)
def test_the_seat_of_a_server_that_is_gone(facts: Facts, lost: bool, workers: int, then: str, fails: bool) -> None:
    job = full(facts, workers)
    effects = job.goes(1, lost)
    reason = "server-1 has ended" if lost else "server-1 left"
    assert who(job, 1) == then
    if fails:
        assert effects == [JobFails(f"{reason}; its shard of the model is gone")]
    elif then == "away":
        (effect,) = effects
        assert isinstance(effect, Missed)
        assert (effect.member.incarnation, effect.reason) == (101, reason)
    else:
        assert effects == []
    assert (who(job, 0), job.seats.all_there(2)) == (100, False)


def test_who_is_waited_for_and_since_when() -> None:
    job = full()
    assert (job.seats.away, job.seats.all_there(2)) == ([], True)
    job.goes(1)
    job.now += 4.0
    job.goes(0)
    job.now += 3.0
    assert [(away.member.name, away.since) for away in job.seats.away] == [("server-0", 14.0), ("server-1", 10.0)]
    assert [server.name for server in job.seats.servers] == ["server-0", "server-1"]
    assert job.seats.overdue(job.now, 7.0) is None
    assert job.seats.overdue(job.now, 6.9) == job.seats.away[1]
    assert job.seats.overdue(job.now, 1.0) == job.seats.away[0], "the first one by index"


def test_time_away_counts_anew_after_a_return() -> None:
    job = waiting(MODEL, 0)
    assert job.asks(incarnation=100, holds="digest", timeline=2) == Seat(0)
    job.now += 50.0
    job.goes(0)
    assert job.seats.away[0].since == job.now


def test_a_seat_that_is_taken_is_waited_for_no_more() -> None:
    job = waiting(SAFE, 0, 1)
    assert job.seats.handle(Taken(0, with_shard=True), 12.5) == [Back("server-0", 2.5, True)]
    assert job.seats.handle(Taken(1, with_shard=False), 13.0) == [Back("server-1", 3.0, False)]
    assert job.seats.handle(Taken(1, with_shard=False), 14.0) == [], "nobody was missed"
    assert job.seats.away == []


# ---- newcomers without a shard


def test_the_first_servers_get_the_seats_that_they_wish_or_the_first_free_ones() -> None:
    job = Job(EARLY)
    assert job.asks(wish=1) == Seat(1)
    assert job.asks(wish=1) == Seat(0), "that one is taken"
    assert job.seats.all_there(2)
    assert Job(EARLY).asks(wish=5) == Seat(0), "there is no such seat"


@pytest.mark.parametrize("facts", [EARLY, MODEL, SAFE])
def test_a_server_too_many(facts: Facts) -> None:
    text = (
        "job 'test' already has its 2 servers; raise cluster.servers to start with more, or call paramserver scale "
        "servers=N first if it trains"
    )
    assert full(facts).asks() == TooMany(text)


@pytest.mark.parametrize("replaces", [(), (7,)])
def test_a_server_that_comes_before_the_end_of_another_is_noticed_tries_again(replaces: tuple[int, ...]) -> None:
    job = full()
    (server, _) = job.members.of(Role.SERVER)
    restored = replace(server, pid=7)  # silent until it is heard of
    job.members.restore([restored], expires_at=99.0)
    if replaces:
        job.members.handle(Renewed(server.ident), job.now)
    assert job.asks(replaces=replaces) == TryAgain(
        "job 'test' has its 2 servers, but server-0 is not heard of just now: a place is free within 5 s "
        "(cluster.lease_s), unless it comes back"
    )


@pytest.mark.parametrize(("wish", "index"), [(None, 0), (0, 0), (1, 1), (5, 0)])
def test_a_server_that_begins_anew_gets_a_seat_whose_server_is_away(wish: int | None, index: int) -> None:
    job = waiting(SAFE, 0, 1)
    assert job.asks(wish) == Seat(index, goes_back="has begun anew")
    assert (who(job, index), who(job, 1 - index)) == (77, "away")


def test_it_does_not_get_the_seat_of_a_server_that_is_there() -> None:
    assert waiting(SAFE, 1).asks(wish=0) == Seat(1, goes_back="has begun anew")


def test_without_a_checkpoint_the_job_fails() -> None:
    job = waiting(MODEL, 1, 0)
    assert job.asks() == JobFails(
        "a server has come without a shard in place of server-0, server-1; that shard of the model is gone "
        "(set checkpoint.dir, so that the job can go back to a checkpoint)"
    )
    assert [who(job, 0), who(job, 1)] == ["away", "away"]


def test_without_a_model_nobody_waits_for_a_server_that_had_no_shard() -> None:
    """The server was lost while the first model was set up, and the model was given up for that reason."""
    job = waiting(MODEL, 0)
    job.facts = EARLY
    assert job.asks() == Seat(0)
    assert (job.seats.away, job.seats.all_there(2)) == ([], True)


# ---- servers that come back with their shard


@pytest.mark.parametrize("facts", [MODEL, SAFE])
@pytest.mark.parametrize("wish", [None, 0, 1])
def test_a_server_that_was_cut_off_gets_its_own_seat(facts: Facts, wish: int | None) -> None:
    job = waiting(facts, 0, 1)
    assert job.asks(wish, 101, holds="digest", timeline=2) == Seat(1)
    assert [who(job, 0), who(job, 1)] == ["away", 101]


def test_while_the_job_goes_back_an_older_shard_will_do() -> None:
    job = waiting(replace(SAFE, going_back=True), 0, 1)
    assert job.asks(None, 101, holds="digest", timeline=1) == Seat(1, goes_back="came back from an older timeline")
    assert job.asks(None, 100, holds="digest", timeline=2) == Seat(0)


@pytest.mark.parametrize(
    ("incarnation", "holds", "timeline", "going_back"),
    [
        (54, "digest", 2, True),
        (101, "digest", 2, True),
        (100, "another", 2, True),
        (100, "digest", 1, False),
    ],
)
def test_any_other_shard_is_of_an_earlier_run(incarnation: int, holds: str, timeline: int, going_back: bool) -> None:
    """Of another process, of a server that is there, of another model, of an older timeline."""
    job = waiting(replace(SAFE, going_back=going_back), 0)
    answer = job.asks(None, incarnation, holds=holds, timeline=timeline)
    assert answer == Stranger("this server holds a shard of an earlier run of job 'test': restart it")
    assert who(job, 0) == "away", "the job still waits for the right one"


# ---- servers whose shards others hold


def relieved(facts: Facts = MODEL, *spare: int) -> Job:
    """A job with replicas: the servers ``spare`` were lost one second ago, and others have taken over their shards."""
    job = full(facts)
    for index in spare:
        job.facts = replace(facts, covered=True)
        assert job.goes(index) == [], "the job waits for nobody"
    job.facts = replace(facts, spare=spare)
    job.now += 1.0
    return job


@pytest.mark.parametrize("facts", [MODEL, SAFE])
@pytest.mark.parametrize("wish", [None, 1])
@pytest.mark.parametrize("timeline", [1, 2])
def test_a_server_that_was_cut_off_drops_its_shards_and_gets_its_seat(
    facts: Facts, wish: int | None, timeline: int
) -> None:
    job = relieved(facts, 1)
    answer = job.asks(wish, 101, holds="digest", timeline=timeline, known=True)
    assert answer == Drop("this server was given up for lost, and other servers hold its shards: it drops them")
    assert who(job, 1) == "free", "nothing has changed, so it may ask as often as it likes"
    assert job.asks(wish, 101, known=True) == Seat(1)
    assert who(job, 1) == 101


@pytest.mark.parametrize(("known", "holds"), [(False, "digest"), (True, "another")])
def test_a_server_of_another_run_drops_nothing(known: bool, holds: str) -> None:
    answer = relieved(SAFE, 1).asks(1, 101, holds=holds, timeline=2, known=known)
    assert answer == Stranger("this server holds a shard of an earlier run of job 'test': restart it")


def test_nothing_is_dropped_that_the_job_waits_for() -> None:
    """The shards of server-0 are nowhere else: it comes back with them, however long it was away."""
    job = relieved(MODEL, 1)
    job.goes(0)
    assert who(job, 0) == "away"
    assert job.asks(None, 100, holds="digest", timeline=2, known=True) == Seat(0)


def test_nothing_is_dropped_while_another_server_has_the_seat() -> None:
    job = relieved(MODEL, 1)
    assert job.asks(1) == Seat(1)
    answer = job.asks(1, 101, holds="digest", timeline=2, known=True)
    assert answer == Stranger("this server holds a shard of an earlier run of job 'test': restart it")


@pytest.mark.parametrize(("wish", "index"), [(None, 1), (0, 1), (1, 1), (5, 1)])
def test_in_a_seat_whose_shards_others_hold_nobody_needs_a_shard(wish: int | None, index: int) -> None:
    """Also while the job waits for another server: the newcomer does not end the job."""
    job = relieved(MODEL, 1)
    job.goes(0)
    assert job.asks(wish) == Seat(index)
    assert [who(job, 0), who(job, 1)] == ["away", 77]
    assert isinstance(job.asks(0, 78), JobFails), "but this one would have to bring the shards of server-0"


@pytest.mark.parametrize(
    ("wish", "answer"),
    [(1, Seat(1)), (0, Seat(0, goes_back="has begun anew")), (None, Seat(0, goes_back="has begun anew"))],
)
def test_with_a_checkpoint_the_job_goes_back_only_for_the_seat_whose_shards_are_lost(
    wish: int | None, answer: Seat
) -> None:
    job = relieved(SAFE, 1)
    job.goes(0)
    assert job.asks(wish) == answer


# ---- random sequences


def test_random_sequences() -> None:
    """A seat has one server at most. A server with its shard gets its own seat, or none, and nobody loses a seat."""
    dice = random.Random(16)
    met: dict[str, int] = {}
    for _ in range(400):
        job = Job(replace(EARLY, servers=3))
        lost_at: dict[int, float] = {}  # by index
        shards: dict[int, int] = {}  # where a server with this incarnation has its shard
        for incarnation in range(1, 40):
            job.now += dice.random()
            there = {server.index: server.incarnation for server in job.members.of(Role.SERVER)}
            if dice.random() < 0.05 and not job.facts.layout and len(there) == 3:
                job.facts = replace(job.facts, layout="digest", can_go_back=dice.random() < 0.7)
            if dice.random() < 0.1:
                job.facts = replace(job.facts, going_back=not job.facts.going_back)
            before = {away.member.index: away.member.incarnation for away in job.seats.away}
            if there and dice.random() < 0.4:
                index = dice.choice(sorted(there))
                effects = job.goes(index, lost=dice.random() < 0.8)
                if any(isinstance(effect, Missed) for effect in effects):
                    lost_at[index], shards[there[index]] = job.now, index
                met["goes"] = met.get("goes", 0) + 1
            elif before and dice.random() < 0.4:
                former = dice.choice(sorted(before.values()))
                timeline = dice.choice([1, 2])
                answer = job.asks(dice.choice([None, 0, 1, 2]), former, holds="digest", timeline=timeline)
                comes = timeline == 2 or job.facts.going_back
                assert isinstance(answer, Seat if comes else Stranger)
                if isinstance(answer, Seat):
                    assert answer.index == shards[former]
                    del lost_at[answer.index]
                met["comes back"] = met.get("comes back", 0) + 1
            else:
                answer = job.asks(dice.choice([None, 0, 1, 2, 9]), incarnation)
                if isinstance(answer, Seat):
                    assert answer.index not in there
                    assert not before or answer.index in before
                    assert bool(answer.goes_back) == bool(before)
                    lost_at.pop(answer.index, None)
                met[type(answer).__name__] = met.get(type(answer).__name__, 0) + 1
            present = [server.index for server in job.members.of(Role.SERVER)]
            assert len(present) == len({*present}), "a seat has one server at most"
            assert {away.member.index: away.since for away in job.seats.away} == lost_at
            assert not {*present} & {*lost_at}, "a server that is away has its seat to itself"
            assert job.seats.all_there(3) == (len(present) == 3)
    assert {"goes", "comes back", "Seat", "JobFails", "TooMany"} <= {*met}
    assert min(met.values()) > 50, met
