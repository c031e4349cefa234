"""How many contributions a server takes on at once."""

from __future__ import annotations

import pytest

from paramserver.errors import OverloadedError
from paramserver.server.versions.intake import Intake


def test_no_more_arrive_than_there_is_memory_for() -> None:
    intake = Intake(budget_bytes=1000)
    with intake.receiving(queued=3, shard_bytes=200):
        with pytest.raises(OverloadedError) as caught, intake.receiving(queued=4, shard_bytes=200):
            raise AssertionError("there is no room")
        assert str(caught.value) == "this server has 5 contributions on its hands already: try again soon"
    assert (intake.most, intake.turned_away) == (4, 1)
    with intake.receiving(queued=4, shard_bytes=200):
        pass


def test_who_fails_makes_room() -> None:
    intake = Intake(budget_bytes=1)
    for _ in range(10):
        with pytest.raises(ValueError, match=r"^broken$"), intake.receiving(queued=3, shard_bytes=1):
            raise ValueError("broken")
    assert intake.turned_away == 0


@pytest.mark.parametrize(("shard_bytes", "room"), [(1 << 40, 4), (1 << 20, 256), (1, 1024), (0, 1024)])
def test_a_few_always_and_never_thousands(shard_bytes: int, room: int) -> None:
    intake = Intake()
    with intake.receiving(queued=room - 1, shard_bytes=shard_bytes):
        pass
    with pytest.raises(OverloadedError), intake.receiving(queued=room, shard_bytes=shard_bytes):
        raise AssertionError("there is no room")
