"""Whose a place of checkpoints is: who may have it, who is refused, and what is never read or deleted."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserver.checkpoint import catalog, owner
from paramserver.checkpoint.manifest import NewerFormatError
from paramserver.checkpoint.owner import Holding, Owner, Verdict, Wish, judge
from paramserver.checkpoint.place import Place
from paramserver.errors import CheckpointError, ConfigError
from paramserver.resume import checkpointing, claiming
from paramserver.resume.claiming import Claim
from tests.support.unit.checkpoints import manifest, save_files

ENDED = Owner("digits", ("a", "b"), live=False, ended=True)
CRASHED = Owner("digits", ("a", "b"))


@pytest.mark.parametrize(
    ("found", "used", "wish", "job", "verdict"),
    [
        (None, False, Wish.BEGIN, "digits", Verdict.NEW),
        (ENDED, False, Wish.BEGIN, "other", Verdict.NEW),  # nothing was ever completed there
        (None, True, Wish.BEGIN, "digits", Verdict.USED),  # of a paramserver that wrote no owner
        (ENDED, True, Wish.BEGIN, "digits", Verdict.USED),
        (ENDED, True, Wish.FRESH, "digits", Verdict.SET_ASIDE),
        (None, True, Wish.FRESH, "digits", Verdict.SET_ASIDE),
        (None, False, Wish.FRESH, "digits", Verdict.NEW),
        (ENDED, True, Wish.RESUME, "other", Verdict.GO_ON),
        (None, True, Wish.RESUME, "other", Verdict.GO_ON),
        (CRASHED, True, Wish.AGAIN, "digits", Verdict.GO_ON),
        (CRASHED, True, Wish.AGAIN, "other", Verdict.USED),
        (ENDED, True, Wish.AGAIN, "digits", Verdict.SET_ASIDE),
        (ENDED, True, Wish.AGAIN, "other", Verdict.USED),
        (None, True, Wish.AGAIN, "digits", Verdict.USED),
    ],
)
def test_who_may_have_a_place(found: Owner | None, used: bool, wish: Wish, job: str, verdict: Verdict) -> None:
    assert judge(found, used, wish, job) is verdict


def test_who_takes_over_needs_the_same_history() -> None:
    assert judge(CRASHED, True, Wish.TAKE_OVER, "digits", ("a",)) is Verdict.GO_ON
    assert judge(None, True, Wish.TAKE_OVER, "digits", ("a",)) is Verdict.GO_ON
    assert judge(CRASHED, True, Wish.TAKE_OVER, "digits", ("b",)) is Verdict.OTHERS
    # A coordinator that did not know yet that servers hold the job has given an empty place another history.
    gone = dataclasses.replace(CRASHED, live=False)
    assert judge(gone, False, Wish.TAKE_OVER, "digits", ("b",)) is Verdict.GO_ON
    assert judge(gone, True, Wish.TAKE_OVER, "digits", ("b",)) is Verdict.OTHERS
    assert judge(gone, False, Wish.TAKE_OVER, "letters", ("b",)) is Verdict.OTHERS
    assert judge(dataclasses.replace(gone, live=True), False, Wish.TAKE_OVER, "digits", ("b",)) is Verdict.OTHERS


def test_what_is_written_is_read() -> None:
    one = Owner("digits", ("a", ""), "host:1", "host", "m", 7, 8, "/ckpt", "c", "2026-11-22T10:00:00+00:00", 3)
    assert owner.decode(owner.encode(one)) == one


def wrong(change: Callable[[str], str]) -> bytes:
    return change(owner.encode(CRASHED).decode()).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-5],
        lambda text: "[]",
        lambda text: text.replace('"pid": 0', '"pid": "0"'),
        lambda text: text.replace('"histories"', '"history"'),
        lambda text: text.replace('"a",', "1,"),
        lambda text: text.replace('"digits"', '"di\\u0007gits"'),
    ],
)
def test_a_damaged_one_is_refused(change: Callable[[str], str]) -> None:
    with pytest.raises(CheckpointError):
        owner.decode(wrong(change))


def test_one_of_a_later_paramserver_is_left_alone(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    (tmp_path / "OWNER.json").write_bytes(
        wrong(lambda text: text.replace('"format_version": 1', '"format_version": 2'))
    )
    with pytest.raises(NewerFormatError):
        owner.read(place)
    with pytest.raises(ConfigError, match="whose the checkpoints are cannot be told"):
        take(place, Wish.FRESH)


# ---- claiming


def take(place: Place, wish: Wish, job: str = "digits", **others: object) -> Holding:
    """What a process does that begins."""
    return asyncio.run(claiming.claim(place, Claim(job, wish, choices="do this or that", **others)))  # type: ignore[arg-type]


def end(holding: Holding, ended: bool = True) -> None:
    asyncio.run(claiming.leave(holding, ended))


def save(place: Place, version: int, timeline: int = 1, history: str = "") -> str:
    """A checkpoint of this history."""
    weights, state = save_files(place, version, timeline)
    position = {"histories": [history]} if history else {}
    made = manifest(weights, state, version, timeline, position=position)
    catalog.write_manifest(place, made)
    return made.name


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(str(tmp_path / "ckpt"))
    made.prepare()
    return made


def test_a_used_place_is_refused_and_nothing_is_touched(place: Place, tmp_path: Path) -> None:
    save(place, 42)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(
        ConfigError, match=r"holds checkpoints of job digits \(the newest is step-00000042-t1\): do this"
    ):
        take(place, Wish.BEGIN)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_fresh_keeps_the_old_ones_elsewhere(place: Place, tmp_path: Path) -> None:
    (tmp_path / "ckpt" / "notes.txt").write_text("mine")
    for number in (1, 2):
        first = take(place, Wish.FRESH)
        name = save(place, 42, history=first.history)
        end(first)
        end(take(place, Wish.FRESH))
        aside = tmp_path / f"ckpt.old-{number}"
        assert catalog.load_manifest(Place(str(aside)), name).history == first.history
        kept = owner.read(Place(str(aside)))
        assert kept is not None
        assert kept.histories == first.histories
        assert place.names() == []
    assert (tmp_path / "ckpt" / "notes.txt").read_text() == "mine", "what is not ours stays"


def test_each_run_is_a_history_that_goes_on_from_those_before(place: Place) -> None:
    first = take(place, Wish.BEGIN)
    save(place, 1, history=first.history)
    end(first)
    second = take(place, Wish.RESUME)
    assert second.histories == (second.history, first.history)
    assert second.history != first.history
    end(second, ended=False)
    assert take(place, Wish.AGAIN).histories == second.histories, "a restart of the job is the same run"


def test_of_a_paramserver_that_wrote_no_owner(place: Place) -> None:
    save(place, 1)
    holding = take(place, Wish.RESUME)
    assert holding.ours("")
    end(holding)


def test_a_second_live_owner_is_refused_and_hears_of_the_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "ENDING_S", 0.1)
    first = take(place, Wish.BEGIN, coordinator="here:8790")
    for wish in (Wish.BEGIN, Wish.RESUME, Wish.FRESH, Wish.AGAIN):
        with pytest.raises(ConfigError, match=r"in use: job digits \(coordinator at here:8790, .*since 20"):
            take(place, wish)
    end(first, ended=False)
    end(take(place, Wish.BEGIN))


def test_one_whose_process_is_gone_is_followed_at_once(place: Place) -> None:
    first = take(place, Wish.BEGIN)
    save(place, 1, history=first.history)
    assert first.mine is not None
    for gone in ({"pid": 2**22 + 1}, {"pid": 1, "birth": 1}, {"claim": "of a process before this one"}):
        owner.write(place, dataclasses.replace(first.mine, **gone))
        end(take(place, Wish.RESUME))


def test_a_copy_of_a_live_place_is_nobodys(place: Place, tmp_path: Path) -> None:
    first = take(place, Wish.BEGIN)
    copy = Place(str(tmp_path / "copy"))
    copy.prepare()
    (tmp_path / "copy" / "OWNER.json").write_bytes((tmp_path / "ckpt" / "OWNER.json").read_bytes())
    end(take(copy, Wish.BEGIN))
    first.check()


def test_on_another_machine_only_silence_tells(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "SILENT_S", 0.5)
    monkeypatch.setattr(claiming, "_LOOK_S", 0.01)
    elsewhere = Owner("digits", ("a",), "there:8790", "there", machine="another", pid=os.getpid())
    save(place, 1, history="a")
    owner.write(place, elsewhere)
    assert take(place, Wish.RESUME).ours("a")

    owner.write(place, elsewhere)

    async def beating() -> None:
        taking = asyncio.create_task(claiming.claim(place, Claim("digits", Wish.RESUME)))
        await asyncio.sleep(0.1)
        owner.write(place, dataclasses.replace(elsewhere, beat=1))
        with pytest.raises(ConfigError, match="coordinator at there:8790"):
            await taking

    asyncio.run(beating())


def test_of_many_at_the_same_time_one_gets_it(place: Place) -> None:
    async def all_at_once() -> list[Holding | BaseException]:
        return await asyncio.gather(
            *(claiming.claim(place, Claim(f"job-{i}", Wish.BEGIN)) for i in range(8)), return_exceptions=True
        )

    found = asyncio.run(all_at_once())
    (winner,) = [one for one in found if isinstance(one, Holding)]
    assert winner.mine is not None
    assert all(f"in use: job {winner.mine.job}" in str(one) for one in found if one is not winner)
    end(winner)


def test_whoever_has_lost_the_place_leaves_it_alone(place: Place) -> None:
    first = take(place, Wish.BEGIN)
    other = Owner("another", ("z",))
    owner.write(place, other)
    for touch in (first.check, first.beat, lambda: first.leave(True)):
        with pytest.raises(CheckpointError, match="is kept by job another"):
            touch()
    end(first)
    assert owner.read(place) == other


def test_in_memory_and_other_urls() -> None:
    place = Place("memory://owned/ckpt")
    place.prepare()
    first = take(place, Wish.BEGIN)
    name = save(place, 3, history=first.history)
    end(first)
    with pytest.raises(ConfigError, match="holds checkpoints of job digits"):
        take(place, Wish.BEGIN)
    end(take(place, Wish.FRESH))
    assert place.names() == []
    assert catalog.load_manifest(Place("memory://owned/ckpt.old-1"), name).history == first.history


# ---- what is read and deleted


def test_only_ones_own_are_deleted_and_gone_back_to(place: Place) -> None:
    for version in (1, 2, 3):
        save(place, version, timeline=9, history="others")
    mine = [save(place, version, timeline=1, history="mine") for version in (1, 2, 3)]
    ours = ("mine",).__contains__
    assert catalog.prune(place, 1, ours=ours) == mine[:2]
    assert [found.name for found in catalog.complete(place, ours)] == mine[2:]
    assert len(place.names()) == 4


def test_resume_means_the_checkpoints_of_the_owner(place: Place) -> None:
    """Others may have been copied into the directory; the higher timeline is not the newer one."""
    holding = take(place, Wish.BEGIN)
    save(place, 7, timeline=5, history="others")
    save(place, 3, timeline=1, history=holding.history)
    end(holding)
    assert checkpointing.find_checkpoint(place.url).version == 3
