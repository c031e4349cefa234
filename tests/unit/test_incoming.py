"""Weights that are still on their way: each is put in its place when it is read, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from paramserver import errors
from paramserver.core.layout.plan import TensorSpec, make_layout
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.tensors.dtypes import buffer_of
from paramserver.worker.flat import FlatSpace
from paramserver.worker.weights.incoming import IncomingWeights
from paramserver.worker.weights.pulled import Pulled
from paramserver.worker.weights.rest import Rest

# Three tensors of 16 numbers, a chunk each; the fourth has two.
LAYOUT = make_layout([TensorSpec(name, (16,), "float32") for name in "abc"] + [TensorSpec("d", (32,), "float32")], 64)


def pulled(rest: Rest) -> Pulled:
    return Pulled(3, 0, 0, Consistency(Mode.SYNC), {}, rest=rest)


class Script:
    """Waits for weights that should be here."""

    def __init__(self, rests: Sequence[Rest]) -> None:
        self.space = FlatSpace(LAYOUT, torch.device("cpu"))
        self.waits: list[str] = []
        self.looked = 0
        self.incoming = IncomingWeights(
            self.space, [pulled(rest) for rest in rests], None, self.goes_on, self.waits.append
        )

    def goes_on(self) -> None:
        self.looked += 1
        raise errors.RolledBackError("back")

    def values(self) -> list[float]:
        return [float(self.space.chunk(chunk.index)[0]) for chunk in LAYOUT.chunks]


def comes(rest: Rest, *chunks: int) -> None:
    for chunk in chunks:
        rest.came(chunk, buffer_of(torch.full((16,), 1.0 + chunk)))


def ends(rest: Rest, error: Exception | None) -> None:
    async def end() -> None:
        if error is not None:
            raise error

    async def main() -> None:
        task = asyncio.ensure_future(end())
        rest.comes_by(task)
        await asyncio.wait([task])

    asyncio.run(main())


def test_each_is_put_in_its_place_when_it_is_read() -> None:
    first, second = Rest("server-0", [0, 2, 4]), Rest("server-1", [1, 3])
    script = Script([first, second])
    comes(first, 0, 2, 4)
    comes(second, 1, 3)
    assert script.values() == [0, 0, 0, 0, 0]
    script.incoming.read(1)
    assert script.values() == [0, 2, 0, 0, 0]
    script.incoming.read(3)
    assert script.values() == [0, 2, 0, 4, 5]
    script.incoming.settle()
    assert script.values() == [1, 2, 3, 4, 5]
    assert script.waits == []
    assert script.incoming.waited_s == 0.0


def test_who_is_waited_for_is_said_and_a_job_that_goes_back_ends_it() -> None:
    first, second = Rest("server-0", [0]), Rest("server-1", [1])
    script = Script([first, second])
    comes(first, 0)
    script.incoming.read(0)
    script.incoming.read(1)  # nothing is raised into the middle of a forward pass
    assert script.waits == ["weights of server-1", ""]
    assert script.looked == 1
    assert script.incoming.waited_s > 0.0
    with pytest.raises(errors.RolledBackError):
        script.incoming.settle()


def test_nobody_waits_any_more_once_something_has_failed() -> None:
    rest = Rest("server-0", [0, 1])
    script = Script([rest])
    ends(rest, errors.GoneError("gone"))
    script.incoming.read_all()
    assert script.looked == 0
    with pytest.raises(errors.GoneError):
        script.incoming.settle()


def test_what_has_come_before_the_end_is_there() -> None:
    rest = Rest("server-0", [0, 1])
    script = Script([rest])
    comes(rest, 0, 1)
    ends(rest, None)
    script.incoming.settle()
    assert script.values()[:2] == [1, 2]


def test_what_was_read_is_known_and_what_was_here_need_not_be_read() -> None:
    rest = Rest("server-0", [0, 2])  # the second tensor was here
    script = Script([rest])
    comes(rest, 0, 2)
    assert script.incoming.unread({0, 1, 2}) == {0, 2}
    script.incoming.complete()
    assert script.incoming.unread({0, 1, 2}) == {0, 2}
    script.incoming.read(0)
    assert script.incoming.unread({0, 1, 2}) == {2}
    assert script.incoming.unread({0, 1}) == set()
    script.incoming.read_all()
    assert script.incoming.unread({0, 1, 2}) == set()


def test_what_is_not_wanted_any_more_changes_nothing() -> None:
    rest = Rest("server-0", [0])
    script = Script([rest])
    comes(rest, 0)
    script.incoming.drop()
    script.incoming.read_all()
    assert script.values()[0] == 0
