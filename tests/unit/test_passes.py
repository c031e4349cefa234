"""Which epoch an iteration over the loader belongs to."""

from __future__ import annotations

import pytest

from paramserver import errors
from paramserver.core.work.passes import Passes


def whole(passes: Passes, steps: bool = True) -> int:
    """One iteration over the loader from start to end; the epoch that it belonged to."""
    passes.check(passes.begin())
    passes.stepped = passes.stepped or steps
    passes.ended = True
    return passes.epoch


def left(passes: Passes, steps: bool) -> int:
    """One that is left in the middle, after optimizer steps or before the first."""
    passes.begin()
    passes.stepped = passes.stepped or steps
    return passes.epoch


def test_every_pass_of_a_plain_loop_is_the_next_epoch() -> None:
    passes = Passes()
    assert [whole(passes) for _ in range(3)] == [0, 1, 2]
    assert passes.plain
    assert not passes.left
    assert passes.last, "it may be the last one, so the end of each is waited for"


def test_an_empty_pass_counts_as_well() -> None:
    passes = Passes()
    assert [whole(passes, steps=False) for _ in range(3)] == [0, 1, 2]


def test_looking_at_a_batch_is_no_pass_and_breaking_off_is_one() -> None:
    passes = Passes()
    assert [left(passes, False), left(passes, False), whole(passes)] == [0, 0, 0]
    assert [left(passes, True), left(passes, True), left(passes, False), whole(passes)] == [1, 2, 3, 3]
    assert not passes.left
    left(passes, True)
    assert passes.left


def test_an_epoch_of_ctx_epochs_has_one_pass() -> None:
    passes = Passes()
    passes.plan(4, last=False)
    assert left(passes, True) == 4
    assert whole(passes) == 4, "what was left of it"
    with pytest.raises(errors.UserError, match="has given all of its slices of epoch 5: iterate over it once"):
        passes.begin()
    passes.plan(5, last=True)
    assert whole(passes) == 5
    passes.plan_ended(6)
    with pytest.raises(errors.UserError, match=r"ctx\.epochs\(6\) has come to its end"):
        passes.begin()
    passes.plan(6, last=True)  # more epochs were planned after all
    assert whole(passes) == 6


def test_plain_passes_go_on_where_a_loop_over_ctx_epochs_was_left() -> None:
    passes = Passes()
    passes.plan(0, last=False)
    whole(passes)
    passes.plan(1, last=False)
    left(passes, True)
    assert not passes.plain
    passes.leave()
    assert passes.last
    assert [whole(passes), whole(passes)] == [2, 3]


def test_of_two_iterations_at_once_the_older_one_is_refused() -> None:
    passes = Passes()
    older = passes.begin()
    passes.check(older)
    newer = passes.begin()
    passes.check(newer)
    with pytest.raises(errors.UserError, match="another iteration over the prepared loader has begun"):
        passes.check(older)


def test_the_body_of_the_loop_may_ask_ahead_and_is_still_in_the_loop() -> None:
    """The last turn on the last batch finds that nothing is left, before the script's scheduler steps."""
    passes = Passes()
    passes.plan(0, last=True)
    passes.begin()
    passes.gives(0)
    passes.gives(None)
    passes.looked_ahead()
    assert passes.in_loop
    assert not passes.ended
