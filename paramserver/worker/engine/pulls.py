"""How the next version is waited for, and how a worker asks for slices of others."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Coroutine
from typing import Any

from paramserver import errors
from paramserver.core.versions.events import Want
from paramserver.v1 import shard_pb2
from paramserver.worker.engine.leases import Leases
from paramserver.worker.engine.weights import Weights
from paramserver.worker.weights.pulled import Pulled


class Pulls(Weights, Leases):
    """Asks shards for versions, and for slices of others."""

    def advance(
        self,
        version: int,
        generation: tuple[int, ...],
        pulling: concurrent.futures.Future[list[Pulled]],
        waiting: Coroutine[Any, Any, list[Pulled] | int] | None = None,
    ) -> int | None:
        """Wait until every shard has published ``version`` and take it in; returns early on a new membership.

        ``pulling`` asks for it, see `begin_pull`. ``waiting``: gets what that brings, or a slice that is to be computed
        meanwhile, which is then returned.
        """

        def moved() -> bool:
            return self.generation != generation

        results: list[Pulled] | int | None
        if waiting is None or pulling.done():
            if waiting is not None:
                waiting.close()
            results = self._watch(pulling, moved)
        else:
            results = self._watch(self.background.submit(waiting), moved)
            if isinstance(results, int) or results is None:
                pulling.cancel()
        if isinstance(results, int):
            return results
        if not results and self._run(self.links.pulls.published(version)):
            # Whoever left had seen this step complete: nothing of it is to be computed again.
            results = self._watch(self.background.submit(self.links.pulls.pull_version(version)))
        if results is not None:
            self._install(results)
        return None

    def begin_pull(self, version: int) -> concurrent.futures.Future[list[Pulled]]:
        """Ask every shard for ``version`` or a later one."""
        self._wait_for_copy()
        begun = self._early.pull(version)
        return begun or self.background.submit(
            self.links.pulls.pull_version(version, ahead=True, begin=self._may_begin)
        )

    def ask_for_work(self, server: int, question: shard_pb2.StealRequest) -> shard_pb2.StealResponse | None:
        """Ask a server which slice to compute now; None if there is no answer."""
        return self._watch(self.background.submit(self.links.questions.steal(server, question)))

    def pull_now(self, want: Want) -> int | None:
        """Pull at a clock from every shard; returns the slowest clock, None if the job is synchronous by now."""
        self._wait_for_copy()
        try:
            results = self._watch(self.background.submit(self.links.pulls.pull(want, begin=self._may_begin)))
        except errors.FencedError:
            raise
        except errors.StaleViewError:
            self.await_revision(self._wait_timeout_s)
            return None
        self._install(results)
        return max(result.min_clock for result in results)
