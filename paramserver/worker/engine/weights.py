"""How versions come to where the script has its model."""

from __future__ import annotations

import structlog
import torch

from paramserver import errors
from paramserver.core.layout.plan import Kind
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.events import Latest
from paramserver.failpoints import reach
from paramserver.worker.engine.host import Host
from paramserver.worker.flat import FlatSpace
from paramserver.worker.weights.incoming import IncomingWeights
from paramserver.worker.weights.pulled import Pulled, merge

log = structlog.get_logger("paramserver.worker")


class Weights(Host):
    """Takes in what was pulled."""

    def _install(self, results: list[Pulled]) -> None:
        assert self._weights is not None
        self._forget()
        if self.in_place is not None:
            self._weights = self.in_place.install(results)
        else:
            self._bring(results)
        self._versions = [result.version for result in results]
        kept = all(result.slot is None and result.rest is None for result in results)
        self._received = results if kept and self.consistency.mode is Mode.ASYNC else []
        self.pool.installed(self.version)
        if self._staging is not None:
            self._staging.pool.installed(self.version)
        self.skipped = max(result.skipped for result in results)
        self.taken = results[0].taken
        self.heard_schedule = max(result.schedule for result in results)
        newest = max((result.consistency for result in results), key=lambda c: c.revision)
        if self._consistency is None or newest.revision > self._consistency.revision:
            self._consistency = newest
        self._on_weights(self._weights)
        if self._incoming is not None and not self._listens(self._incoming, self._weights):
            self.reads = None
            self._complete()
            self._on_weights(self._weights)  # which may have copied what was not there
        reach("worker.after_pull", self.version)

    def _bring(self, results: list[Pulled]) -> None:
        """Copy what was pulled to where the model is; that may go on when this returns."""
        assert self._weights is not None
        if self._mover is None:
            self._weights.write(merge(results), self.rounding)
            if any(result.rest is not None for result in results):
                self._begin(results, self._weights)
            return
        self._wait_for_copy()
        for result in results:
            if result.slot is not None:
                for _, source in self._weights.places(result.chunks, self.rounding):
                    self._mover.lock(source, writable=False)
        places = list(self._weights.places(merge(results), self.rounding))
        self._bringing = self._mover.bring([source for _, source in places], [target for target, _ in places])

    @property
    def whole(self) -> bool:
        """Whether all weights of the version at hand are there."""
        return self._incoming is None

    # ---- weights that the script begins with before all of them are there

    @property
    def _may_begin(self) -> bool:
        """Whether the script may compute on the first weights while others are on their way."""
        return self.reads is not None and self._mover is None and self.in_place is None

    def _begin(self, results: list[Pulled], space: FlatSpace) -> None:
        """Some are still to come: the script gets each before it reads it, and buffers at once."""

        def goes_on() -> None:
            self.session.check()
            if self.rolled_back():
                raise errors.RolledBackError("the job goes back to a checkpoint")

        self._incoming = IncomingWeights(space, results, self.rounding, goes_on, self._stalls)
        for placement, spec in zip(space.layout.placements, space.layout.tensors, strict=True):
            if spec.kind is Kind.BUFFER:  # of which the model has copies
                self._incoming.read(placement.tensor)

    def _listens(self, incoming: IncomingWeights, space: FlatSpace) -> bool:
        """Have it told what the script reads; False if that cannot be, as with this script it never will."""
        return self.reads is not None and self.reads.begin(incoming, [space.view(i) for i in range(self.reads.count)])

    def _stalls(self, whom: str) -> None:
        """The script waits for somebody, or (if that is empty) goes on."""
        self.waiting_for = whom
        self._waiting += 1 if whom else -1

    def _complete(self) -> None:
        """See to it that all weights are there, of this version or a newer one."""
        if not self._settle():
            self._pull_latest()

    def _pull_latest(self) -> None:
        """Take in the newest version, all of it."""
        self._wait_for_copy()
        sync = self.consistency.mode is Mode.SYNC
        pull = self.links.pulls.pull_version(self.version) if sync else self.links.pulls.pull(Latest())
        self._install(self._watch(self.background.submit(pull)))

    def _settle(self, used: frozenset[int] = frozenset()) -> bool:
        """See to it that all weights are there. False: what yielded gradients of ``used`` was computed on others.

        Raises what keeps them from coming.
        """
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return True
        if self.reads is not None:
            self.reads.end()
        with torch._C.DisableTorchFunction():
            unread = incoming.unread(used)
            try:
                incoming.settle()
            except errors.FencedError:
                raise
            except errors.StaleViewError as error:
                log.info("some weights of the version at hand did not come any more", reason=str(error))
                return False
            finally:
                self.stalled_s += incoming.waited_s
        if unread:
            self.reads = None
            log.info(
                "this script reads weights in a way that cannot be noticed (in other threads or in compiled code): "
                "from now on it gets them when all are there"
            )
        return not unread

    def _forget(self) -> None:
        """Weights that are still to come are those of yesterday."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.drop()
            if self.reads is not None:
                self.reads.end()

    def _wait_for_copy(self) -> None:
        """Wait until weights are no longer read where they came from; before that nobody asks for another version."""
        if self._bringing is not None:
            self._bringing.wait()
            self._bringing = None

    def _take_home(self) -> None:
        """Whoever has left is read from no more: the script keeps a copy of the last weights."""
        if self.in_place is not None and self._weights is not None:
            lent, self._weights = self._weights, FlatSpace(self._weights.layout, self._weights.device)
            self._weights.copy_of(lent)
            self.in_place = None
            self._on_weights(self._weights)
