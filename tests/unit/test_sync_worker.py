"""The state machine of a synchronous worker: whole lists of effects, and whole jobs in random schedules."""

from __future__ import annotations

import math
import random

import pytest

from paramserver.core.work.stealing import Ask, Assignment
from paramserver.core.work.sync_events import (
    Add,
    Answered,
    AskForWork,
    Compute,
    Computed,
    Drop,
    Effect,
    Event,
    Exchange,
    Exchanged,
    Leaving,
    NotAnswered,
    NotNeeded,
    Patience,
    PatienceOver,
    Push,
    PushAndWait,
    PushesArrived,
    PutOff,
    SharesChanged,
    SliceWanted,
    StepBegan,
    StopWaiting,
    Wait,
)
from paramserver.core.work.sync_worker import SyncWorkerState
from tests.support.unit.pacing import Simulation

# A step of 16 slices is dealt out to 4 workers; this one, the second of them, has slices 4 to 7.
WORKER, OF, PLACE, WORKERS = 2, 16, 1, 4


class Shell:
    """A worker in step 1, after a step of four seconds, and its clock: each slice takes a second."""

    def __init__(self, moves: bool = True, servers: int = 1, positions: int = 0) -> None:
        self.state = SyncWorkerState(servers, WORKER, moves, positions)
        for step in (0, 1):
            self.now = 4.0 * step
            self.begin(step)

    def tell(self, event: Event) -> list[Effect]:
        return self.state.handle(event, self.now)

    def begin(self, step: int, place: int = PLACE, workers: int = WORKERS, taken: tuple[int, ...] = ()) -> None:
        assert self.tell(StepBegan(step, OF, place, workers, taken)) == []

    def compute(self, *slices: int) -> list[Effect]:
        """The slices come one after the other; what follows from the last one."""
        effects: list[Effect] = []
        for slice_ in slices:
            assert self.tell(SliceWanted()) == [Compute(slice_)]
            self.now += 1.0
            effects = self.tell(Computed(self.state.step, slice_))
        return effects

    def assignment(self, work_s: float = 1.0) -> Assignment:
        return Assignment(WORKER, PLACE, WORKERS, work_s)

    def ask(self, *finished: int, server: int = 0, work_s: float = 1.0) -> AskForWork:
        return AskForWork(server, Ask(self.assignment(work_s), self.state.step, OF, frozenset(finished)))


@pytest.fixture
def shell() -> Shell:
    return Shell()


def idle(shell: Shell) -> None:
    """It has computed and pushed its range, and waits."""
    shell.compute(4, 5, 6, 7)
    assert shell.tell(Exchanged(Exchange.NOT_MADE)) == [Push((4, 8)), Wait(shell.assignment())]
    assert isinstance(shell.tell(PushesArrived())[0], Patience)


def helped(shell: Shell) -> None:
    """Two steps in which others took two slices: from now on this worker is slow, and asks late in a step."""
    for step in (2, 3):
        shell.now += 4.0
        shell.begin(step, taken=(6, 7))


def test_a_range_is_added_up_and_goes_as_one_with_the_question_for_the_next_version(shell: Shell) -> None:
    assert shell.compute(4) == []
    assert shell.compute(5) == [Add((4, 5), (5, 6))]
    assert shell.compute(6) == []
    assert shell.compute(7) == [
        Add((6, 7), (7, 8)),
        Add((4, 6), (6, 8)),
        PushAndWait((4, 8), 0.25, shell.assignment()),
    ]
    assert shell.tell(Exchanged(Exchange.DONE)) == []
    shell.begin(2)
    assert shell.tell(SliceWanted()) == [Compute(4)]


def test_a_range_that_is_no_node_goes_in_its_nodes(shell: Shell) -> None:
    shell.begin(2, 0, 3)  # 0 to 4
    assert shell.compute(0, 1, 2, 3) == [Add((2, 3), (3, 4)), Add((0, 2), (2, 4)), Push((0, 4))]
    assert shell.compute(4) == [PushAndWait((4, 5), 0.25, Assignment(WORKER, 0, 3, 1.0))]
    shell.begin(3, 1, 3)  # 5 to 9
    assert shell.compute(5) == [Push((5, 6))]
    assert shell.compute(6, 7) == [Add((6, 7), (7, 8)), Push((6, 8))]
    assert shell.compute(8, 9)[-1] == PushAndWait((8, 10), 0.25, Assignment(WORKER, 1, 3, 1.0))


def test_a_slice_that_needs_another_one_is_computed_again_after_it(shell: Shell) -> None:
    """Slice 4 needs a part of slice 6, which in its turn needs more of slice 4; nothing of either counts so far."""
    assert shell.tell(SliceWanted()) == [Compute(4)]
    assert shell.state.others(4) == {5, 6, 7}
    assert shell.tell(PutOff(6)) == []
    assert shell.tell(SliceWanted()) == [Compute(6, unplanned=True)]
    assert shell.tell(PutOff(4)) == []
    assert shell.tell(SliceWanted()) == [Compute(4, unplanned=True)]
    assert shell.tell(Computed(1, 4)) == []
    assert shell.state.others(6) == {5, 7}
    assert shell.tell(SliceWanted()) == [Compute(5)]


def test_a_slice_that_is_no_longer_of_the_own_range_is_not_computed_first(shell: Shell) -> None:
    shell.tell(PutOff(6))
    shell.tell(SharesChanged(0, 4))
    assert shell.tell(SliceWanted()) == [Compute(0)]
    shell.tell(PutOff(2))
    shell.begin(2, 0)
    assert shell.tell(SliceWanted()) == [Compute(0)], "the next step begins with its first slice"


def test_time_in_the_call_counts_as_waiting(shell: Shell) -> None:
    shell.compute(4, 5, 6, 7)
    shell.now += 0.125
    assert shell.tell(Exchanged(Exchange.PUSHED)) == [Wait(shell.assignment())]
    assert shell.tell(PushesArrived()) == [Patience(0.125)]


def test_time_in_which_weights_were_waited_for_is_no_work(shell: Shell) -> None:
    shell.tell(SliceWanted())
    shell.now += 3.0
    shell.tell(Computed(1, 4, stalled_s=1.0))
    assert shell.state.assignment == shell.assignment(2.0)


def test_who_waits_asks_for_work_and_pushes_it_at_once(shell: Shell) -> None:
    idle(shell)
    assert shell.tell(PatienceOver()) == [shell.ask(4, 5, 6, 7)]
    assert shell.tell(Answered(15)) == [StopWaiting(15)]
    assert shell.tell(SliceWanted()) == [Compute(15, unplanned=True)]
    shell.now += 1.0
    assert shell.tell(Computed(1, 15)) == [PushAndWait((15, 16), 0.0, shell.assignment())]
    assert shell.tell(Exchanged(Exchange.NOT_MADE)) == [Push((15, 16)), Wait(shell.assignment())]
    assert shell.tell(PushesArrived()) == [Patience(0.0)], "there may be more"


def test_who_asks_in_vain_waits_longer_each_time(shell: Shell) -> None:
    shell.compute(4, 5, 6, 7)
    shell.tell(Exchanged(Exchange.NOT_MADE))
    assert shell.tell(PushesArrived()) == [Patience(0.25)]
    for seconds in (0.5, 1.0, 2.0, 2.0):
        assert shell.tell(PatienceOver()) == [shell.ask(4, 5, 6, 7)]
        assert shell.tell(Answered(None)) == [Patience(seconds)]


def test_a_server_that_lacks_nothing_is_not_asked_again_in_that_step() -> None:
    shell = Shell(servers=2)
    idle(shell)
    for server in (0, 1, 0):
        assert shell.tell(PatienceOver()) == [shell.ask(4, 5, 6, 7, server=server)]
        shell.tell(Answered(None, complete=True))
    shell.begin(2)
    idle(shell)
    assert shell.tell(PatienceOver()) == [shell.ask(4, 5, 6, 7)]


def test_without_an_answer_while_it_waits_it_asks_again(shell: Shell) -> None:
    idle(shell)
    shell.tell(PatienceOver())
    assert shell.tell(NotAnswered()) == [Patience(0.5)]


def test_the_slow_ask_before_a_slice_and_keep_nothing_back(shell: Shell) -> None:
    helped(shell)
    assert shell.compute(4) == [Push((4, 5))]
    assert shell.compute(5) == [Push((5, 6))]
    shell.now += 1.0
    assert shell.tell(SliceWanted()) == [shell.ask(4, 5)]
    assert shell.tell(Answered(6)) == [Compute(6)]
    shell.now += 1.0
    assert shell.tell(Computed(3, 6)) == [Push((6, 7))]
    assert shell.tell(SliceWanted()) == [shell.ask(4, 5, 6)], "others may have been given slices of its range"
    assert shell.tell(Answered(None)) == [Wait(shell.assignment())]
    assert shell.tell(PushesArrived())[0] == Patience(0.25 * shell.assignment().work_s)


def test_who_asks_in_a_long_step_pushes_what_it_holds_when_it_is_answered(shell: Shell) -> None:
    shell.compute(4)
    shell.now += 6.0
    assert shell.tell(SliceWanted()) == [shell.ask(4)]
    assert shell.tell(Answered(7)) == [Push((4, 5)), Compute(7)]
    shell.now += 1.0
    assert shell.tell(Computed(1, 7)) == [PushAndWait((7, 8), 0.25, shell.assignment())], "5 and 6 are left to others"


def test_without_an_answer_before_a_slice_it_goes_on_as_if_alone(shell: Shell) -> None:
    helped(shell)
    shell.compute(4)
    shell.now += 3.0
    assert shell.tell(SliceWanted()) == [shell.ask(4)]
    assert shell.tell(NotAnswered()) == [Compute(5)]


def test_a_slice_left_to_others_is_computed_here_if_nobody_answers_any_more(shell: Shell) -> None:
    helped(shell)
    shell.compute(4)
    shell.now += 3.0
    shell.tell(SliceWanted())
    assert shell.tell(Answered(12)) == [Compute(12, unplanned=True)]
    shell.now += 1.0
    assert shell.tell(Computed(3, 12)) == [PushAndWait((12, 13), 0.25, shell.assignment())]
    shell.tell(Exchanged(Exchange.NOT_MADE))
    shell.tell(PushesArrived())
    assert shell.tell(PatienceOver()) == [shell.ask(4, 12)]
    assert shell.tell(NotAnswered()) == [StopWaiting(5)]
    assert shell.tell(SliceWanted()) == [Compute(5, unplanned=True)]


def test_a_slice_that_it_has_done_is_not_computed_again(shell: Shell) -> None:
    helped(shell)
    shell.compute(4)
    shell.now += 3.0
    shell.tell(SliceWanted())
    assert shell.tell(Answered(4)) == [Wait(shell.assignment())]


def test_other_shares_end_the_sums_of_the_old_ones(shell: Shell) -> None:
    shell.compute(4)
    assert shell.tell(SharesChanged(PLACE, WORKERS)) == [Push((4, 5))]
    assert shell.compute(5, 6) == [], "slice 5 has lost its neighbour"
    assert shell.compute(7) == [Add((6, 7), (7, 8)), Push((5, 6)), Push((6, 8)), Wait(shell.assignment())]


def test_other_shares_may_be_all_others(shell: Shell) -> None:
    """Slice 4 is of the new range, and is not computed again."""
    shell.compute(4)
    assert shell.tell(SharesChanged(1, 5)) == [Push((4, 5))]
    assert shell.state.range == (3, 6)
    assert shell.compute(3) == [Push((3, 4))]
    assert shell.compute(5)[-1] == PushAndWait((5, 6), 0.25, Assignment(WORKER, 1, 5, 1.0))


def test_other_shares_are_added_up_if_a_worker_has_left_and_no_server_answers(shell: Shell) -> None:
    shell.compute(4)
    assert shell.tell(SharesChanged(0, 3)) == [Push((4, 5))]
    assert shell.state.range == (0, 5)
    for slice_ in range(4):
        (asked,) = shell.tell(SliceWanted())
        assert isinstance(asked, AskForWork)
        assert shell.tell(NotAnswered()) == [Compute(slice_)]
        shell.now += 1.0
        effects = shell.tell(Computed(1, slice_))
        assert [effect for effect in effects if isinstance(effect, Push)] == []
    assert effects[-1] == PushAndWait((0, 4), 0.25, Assignment(WORKER, 0, 3, 1.0))


def test_a_worker_asks_for_work_once_another_one_has_left(shell: Shell) -> None:
    """The worker that left may have computed slices of the new range, or have seen the whole step complete."""
    shell.compute(4)
    assert shell.tell(SharesChanged(0, 3)) == [Push((4, 5))]
    of_three = Assignment(WORKER, 0, 3, 1.0)
    assert shell.tell(SliceWanted()) == [AskForWork(0, Ask(of_three, 1, OF, frozenset({4})))]
    assert shell.tell(Answered(2)) == [Compute(2)]
    shell.now += 1.0
    assert shell.tell(Computed(1, 2)) == [Push((2, 3))]
    assert shell.tell(SliceWanted()) == [AskForWork(0, Ask(of_three, 1, OF, frozenset({2, 4})))]
    assert shell.tell(Answered(None)) == [Wait(of_three)]
    shell.begin(2, 0, 3)
    assert shell.tell(SliceWanted()) == [Compute(0)]


def test_who_has_no_share_waits_and_may_help(shell: Shell) -> None:
    shell.tell(SharesChanged(-1, 3))
    nobody = Assignment(WORKER, -1, 3, 0.0)
    assert shell.tell(SliceWanted()) == [Wait(nobody)]
    assert shell.tell(PushesArrived()) == [Patience(0.5)]
    assert shell.tell(PatienceOver()) == [AskForWork(0, Ask(nobody, 1, OF))]


def test_what_others_have_completed_is_dropped(shell: Shell) -> None:
    shell.compute(4, 5, 6)
    assert shell.tell(SliceWanted()) == [Compute(7)]
    assert shell.tell(StepBegan(3, OF, PLACE, WORKERS)) == [Drop((4, 6)), Drop((6, 7))]
    assert shell.tell(Computed(1, 7)) == [NotNeeded()]
    assert shell.tell(SliceWanted()) == [Compute(4)]
    shell.tell(Computed(3, 4))
    assert shell.tell(Computed(3, 4)) == [NotNeeded()], "it has handed that in"


def test_contributions_that_must_not_be_added_are_pushed_one_by_one(shell: Shell) -> None:
    for slice_ in (4, 5, 6):
        assert shell.tell(SliceWanted()) == [Compute(slice_)]
        assert shell.tell(Computed(1, slice_, apart=True)) == [Push((slice_, slice_ + 1))]
    shell.tell(SliceWanted())
    assert shell.tell(Computed(1, 7, apart=True)) == [PushAndWait((7, 8), 0.01, shell.assignment(0.0))]


def test_who_leaves_pushes_what_it_holds(shell: Shell) -> None:
    shell.compute(4, 5, 6)
    assert shell.tell(Leaving()) == [Push((4, 6)), Push((6, 7))]
    assert shell.tell(Leaving()) == []


def test_where_slices_do_not_move_nobody_asks_and_nothing_is_said() -> None:
    shell = Shell(moves=False)
    helped(shell)
    shell.now += 100.0
    assert shell.compute(4, 5, 6, 7)[-1] == PushAndWait((7, 8), math.inf, None)
    assert shell.tell(Exchanged(Exchange.NOT_MADE)) == [Push((7, 8)), Wait(None)]
    assert shell.tell(PushesArrived()) == []


def test_positions_that_belong_to_a_worker_stay_its_own_in_a_short_step() -> None:
    shell = Shell(moves=False, positions=OF)
    assert shell.tell(StepBegan(2, 6, PLACE, WORKERS)) == []
    assert shell.state.range == (4, 6)


def test_a_slice_may_leave_while_it_is_computed_if_it_is_all_of_the_range(shell: Shell) -> None:
    assert not shell.state.alone(4)
    shell.tell(SharesChanged(PLACE, OF))
    assert shell.state.alone(1)
    assert not shell.state.alone(2)
    shell.compute(1)
    shell.tell(Exchanged(Exchange.NOT_MADE))
    shell.tell(PushesArrived())
    shell.tell(PatienceOver())
    shell.tell(Answered(9))
    assert not shell.state.alone(1), "others may have it, too"


# ---- random schedules; `tests/support/unit/pacing.py` checks each effect


def random_job(seed: int) -> None:
    """Workers of all speeds that hang, get lost and are left out of the shares; messages late and out of order."""
    chance = random.Random(seed)
    workers, of, steps = chance.randint(1, 5), chance.randint(1, 12), chance.randint(1, 4)
    moves = chance.random() < 0.8
    base = [10 ** chance.uniform(-1, 1) for _ in range(workers)]
    slowest_s = 10 ** chance.uniform(-4, 0.5)

    def speed(worker: int, step: int, now: float) -> float:
        return base[worker] * chance.uniform(0.5, 2.0)

    job = Simulation(
        workers,
        of,
        speed,
        failing=chance.choice([0.0, 0.0, 0.3, 1.0]),
        seed=seed,
        message=lambda: chance.uniform(0.0, slowest_s),
        exchanges=chance.choice([0.0, 0.5, 1.0]),
        moves=moves,
        positions=not moves and chance.random() < 0.5,
    )
    for number in range(1, workers):  # worker 0 stays, so that somebody goes on
        when = chance.expovariate(0.2)
        if chance.random() < 0.3:
            job.at(when, lambda now, number=number: job.lose(number, now))  # type: ignore[misc]
        elif chance.random() < 0.3:  # it gets nowhere for a while
            others = [n for n in range(workers) if n != number]
            job.at(when, lambda now, others=others: job.change(others, now))  # type: ignore[misc]
    job.run(steps)
    job.check()


@pytest.mark.parametrize("part", range(4))
def test_random_schedules(part: int) -> None:
    for seed in range(400 * part, 400 * (part + 1)):
        random_job(seed)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_thousand_random_schedules(part: int) -> None:
    for seed in range(5000 * part, 5000 * (part + 1)):
        random_job(seed)
