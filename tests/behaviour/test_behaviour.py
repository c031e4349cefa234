"""Random scripts of users come out as with plain torch, or are refused; and the tester notices what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.behaviour.run import report, smallest, trial
from tests.support.behaviour.generate import Form, draw, fits, of_labels, render, simpler
from tests.support.behaviour.mutants import MUTANTS
from tests.support.pieces.base import Verdict
from tests.support.pieces.kinds import KINDS
from tests.support.pieces.known import KNOWN, known

# Each test runs this many scripts, one after the other.
AT_ONCE = 10
FEW, MANY = 40, 1000
# Of these there are so many besides, in real processes.
REAL = 40
# A fault must show in so many scripts.
SOON = 60


def run(seeds: Iterable[int], real: bool = False) -> None:
    for seed in seeds:
        script = draw(seed, known, real)
        if problem := trial(script):
            pytest.fail(report(script, problem, not real))


@pytest.mark.parametrize("first", range(0, FEW, AT_ONCE))
def test_random_scripts(first: int) -> None:
    run(range(first, first + AT_ONCE))


@pytest.mark.long
@pytest.mark.parametrize("first", range(FEW, MANY, AT_ONCE))
def test_many_random_scripts(first: int) -> None:
    run(range(first, first + AT_ONCE))


@pytest.mark.long
def test_a_random_script_in_processes_of_which_one_is_killed() -> None:
    """The first one in which a server dies, and whose loader starts no processes, which takes long."""
    scripts = (draw(seed, known, True) for seed in range(MANY))
    quick = (script for script in scripts if not script.has("data=a process that loads"))
    run([next(script.seed for script in quick if script.form.kills == ("server",))], True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(REAL))
def test_random_scripts_in_processes(seed: int) -> None:
    run([seed], True)


@pytest.mark.parametrize(
    ("labels", "form"),
    [
        (("loop=no loader", "model=a buffer that counts"), Form(mode="async")),
        (("scheduler=StepLR", "keep=optimizer.state_dict()"), Form(1, 3, 1)),
        (("data=samples as they are", "body=changes the batch in its place"), Form(1)),
    ],
    ids=["the first batch's change of a buffer", "the learning rate of a worker without slices", "changed samples"],
)
def test_what_was_found(labels: tuple[str, ...], form: Form) -> None:
    """Small scripts that failed once."""
    assert not trial(of_labels(labels, form))


@pytest.mark.long
@pytest.mark.parametrize(
    ("labels", "form"),
    [
        (
            ("keep=the best model by an evaluation on all workers",),
            Form(1, 2, 2, real=True, kills=("server",), late=True),
        ),
        (("data=a stream", "body=changes the batch in its place"), Form(1, real=True, kills=("server",))),
    ],
    ids=["an evaluation of an epoch that was undone", "a batch that was handed out twice"],
)
def test_what_was_found_in_processes(labels: tuple[str, ...], form: Form) -> None:
    """Small scripts that failed once when a server was killed."""
    assert not trial(replace(of_labels(labels, form), samples=24, batch=2, epochs=3))


def test_every_piece_is_drawn() -> None:
    """All but those that are known to fail, in the scripts of the long run; a good part of them legal."""
    scripts = [draw(seed, known) for seed in range(MANY)]
    count = Counter(p.label for script in scripts for p in script.pieces)
    left_out = {label for one in KNOWN for label in one.labels if len(one.labels) == 1}
    pieces = {p.label for kind in KINDS.values() for p in kind}
    assert pieces - set(count) == left_out
    assert min(count.values()) >= 2, count.most_common()[-5:]
    verdicts = Counter(script.verdict for script in scripts)
    assert verdicts[Verdict.EQUAL] > MANY // 3
    assert verdicts[Verdict.REFUSED] > MANY // 5


def test_scripts_are_python_and_follow_from_their_seed() -> None:
    for seed in range(200):
        script = draw(seed)
        assert render(draw(seed)) == render(script)
        compile(render(script), "script.py", "exec")
        assert fits(script.form, script.pieces)


def caught(mutant: str) -> int:
    """After how many scripts the fault is noticed."""
    with MUTANTS[mutant]():
        for seed in range(SOON):
            if trial(draw(seed, known)):
                return seed + 1
    raise AssertionError(f"{SOON} scripts have not shown: {mutant}")


def test_a_fault_is_noticed() -> None:
    caught("skipped batch")


@pytest.mark.long
@pytest.mark.parametrize("mutant", [name for name in MUTANTS if name != "skipped batch"])
def test_every_fault_is_noticed(mutant: str) -> None:
    caught(mutant)


def test_a_failing_script_is_made_small() -> None:
    """What does not matter for the failure goes."""
    script = next(s for s in map(draw, range(10_000)) if s.has("model=tied") and s.has("optimizer=Adam"))
    small = smallest(script, lambda one: one.has("model=tied"))
    assert small.labels == ("model=tied",)
    assert not any(one.has("model=tied") and fits(one.form, one.pieces) for one in simpler(small))
    assert "model[2].weight = model[0].weight" in render(of_labels(small.labels))
