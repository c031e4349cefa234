"""Asynchronous mode: which slices to compute, and when the mode changes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Sequence
from typing import cast

from paramserver import errors
from paramserver.core.versions.names import AsyncName
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.worker.engine.host import Host
from paramserver.worker.pace import AsyncPace


class Leases(Host):
    """Asks the coordinator for slices."""

    def lease(
        self,
        epoch: int,
        last: bool,
        want: int,
        done: Sequence[AsyncName],
        wait_s: float,
        holding: Sequence[AsyncName] | None = None,
    ) -> concurrent.futures.Future[coordinator_pb2.LeaseResponse]:
        """Report finished slices and those ``holding`` (None: what the pace holds), and ask for more."""
        if holding is None:
            holding = self._pace.holding if isinstance(self._pace, AsyncPace) else ()
        # That of `done`: this may be sent again after the job went back, and then nothing of it is done.
        timeline = self.links.timeline

        async def go() -> coordinator_pb2.LeaseResponse:
            deadline = time.monotonic() + self._wait_timeout_s
            while True:
                request = coordinator_pb2.LeaseRequest(
                    member=self.session.member,
                    max_epoch=epoch,
                    want=want,
                    done=[shard_pb2.AsyncName(epoch=name.epoch, index=name.index) for name in done],
                    holding=[shard_pb2.AsyncName(epoch=name.epoch, index=name.index) for name in holding],
                    last_epoch=last,
                    wait_s=wait_s,
                    revision=self._paced.revision if self._paced else 0,
                    timeline=timeline,
                )
                try:
                    reply = await self.session.channel.call("Coordinator.Lease", request, timeout=wait_s + 30.0)
                    return cast(coordinator_pb2.LeaseResponse, reply)
                except errors.RolledBackError:
                    raise
                except (errors.RetryableError, errors.FencedError) as error:
                    self.session.check()
                    if time.monotonic() > deadline:
                        raise errors.DeadlineError(
                            f"no slices could be leased for {self._wait_timeout_s:g} s: {error}"
                        ) from error
                    await asyncio.sleep(0.2)

        return self.background.submit(go())

    def idle(self) -> None:
        """Hold nobody back."""
        self.wait(self.background.submit(self.links.questions.idle()))

    def await_revision(self, timeout_s: float) -> bool:
        """Wait for the setting that comes after the pace's; False if it was not announced in time."""
        revision = self._paced.revision if self._paced else 0
        self.waiting_for = "the change of mode"
        try:
            self._run(
                self.session.wait_until(
                    lambda view: view.consistency.revision > revision, lambda view: "the change of mode", timeout_s
                )
            )
        except errors.DeadlineError:
            return False
        finally:
            self.waiting_for = ""
        return True
