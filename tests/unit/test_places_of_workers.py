"""Workers tell a word of their host. In the view, workers of one host are side by side."""

from __future__ import annotations

import pytest

from paramserver.coordinator.leadership.members import member_of
from paramserver.coordinator.service import CoordinatorService
from paramserver.errors import ProtocolError
from paramserver.v1 import types_pb2
from tests.support.unit.joins import request, with_job


def test_the_view_has_workers_of_a_host_side_by_side() -> None:
    async def work(service: CoordinatorService) -> None:
        for number, host in enumerate(("x", "y", "x")):
            await service.join(request(role=types_pb2.ROLE_WORKER, host=host, incarnation=number + 1))
        job = service.job
        assert [worker.rank for worker in job.view().workers] == [0, 2, 1]
        assert [worker.rank for worker in job.worker_infos()] == [0, 2, 1], "servers hear the same"
        kept = {one.index: member_of(one).host for one in job.record().members}
        assert kept == {0: "x", 1: "y", 2: "x"}, "the next coordinator knows it, too"

    with_job(work, slices_per_step=3)


def test_the_main_worker_has_slices_if_others_have_none() -> None:
    async def work(service: CoordinatorService) -> None:
        for number in range(3):
            await service.join(request(role=types_pb2.ROLE_WORKER, incarnation=number + 1))
        view = service.job.view()
        assert [worker.rank for worker in view.workers] == [1, 0, 2], "the first of three has none of two slices"
        assert view.main == view.workers[1].member

    with_job(work, slices_per_step=2)


def test_a_word_that_is_too_long_is_refused() -> None:
    async def work(service: CoordinatorService) -> None:
        with pytest.raises(ProtocolError, match=r"^host has"):
            await service.join(request(role=types_pb2.ROLE_WORKER, host="x" * 100_000))

    with_job(work)
