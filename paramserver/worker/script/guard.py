"""Checks between two slices whether a script wrote to its model: an error if the write would be lost, or a warning."""

from __future__ import annotations

from collections.abc import Iterator

import structlog
from torch import nn

from paramserver import errors
from paramserver.core.layout.plan import Kind
from paramserver.worker.flat import FlatSpace
from paramserver.worker.script.binding import ModelBinding
from paramserver.worker.weights.weights import Watch, Weights
from paramserver.worker.weights.writes import Writes

log = structlog.get_logger("paramserver.worker")

_SEE = "(see docs/training.md, Weights are for reading)"


class Guard(Watch):
    """Watches one model on one worker."""

    def __init__(self, weights: Weights, binding: ModelBinding, model: nn.Module) -> None:
        self._weights, self._binding, self._model = weights, binding, model
        self._trained = Writes({i: binding.parameters[i] for i in self._of(Kind.PARAMETER)})
        self._frozen = Writes({i: binding.parameters[i] for i in self._of(Kind.FROZEN)})
        self._told: set[str] = set()
        self._failed = False
        # The script may have put other layers into the model since the last look.
        self._may_be_another = True

    def _of(self, kind: Kind) -> list[int]:
        return [index for index, _ in enumerate(self._binding.parameters) if self._binding.specs[index].kind is kind]

    def begins(self, others: Iterator[int]) -> None:
        """Version 0 is about to come. Warns if another worker brought it, and this worker brought other values."""
        if (index := next(others, None)) is not None:
            log.warning(
                f"the job begins with the weights of the main worker, and not with this worker's, which differ in "
                f"{self._name(index)!r} (see docs/training.md, First weights)"
            )

    def came(self, weights: FlatSpace) -> None:
        """Give the model the version in ``weights``."""
        self._binding.load(weights)
        self._begin()

    def _begin(self) -> None:
        """From now on writes are noticed."""
        self._trained.came(self._weights.whole and self._weights.in_place is None)
        self._frozen.came(False)

    def outside(self) -> None:
        """The script leaves the loop, and may do anything until it comes back."""
        self._may_be_another = True
        if self._weights.whole:
            self._trained.outside()

    def check(self) -> None:
        """Raises UserError if the script has written to parameters that are trained, which would be lost.

        Writes that the script has undone, for example weights that were swapped in for an evaluation, are no error.
        A warning says that parameters which the optimizer does not have are the script's own.
        """
        if name := self._another():
            raise errors.UserError(
                f"the model has another parameter {name!r} than at ctx.prepare, which nobody trains: the optimizer and "
                "the servers have the former one. Put layers into the model before ctx.prepare"
            )
        suspects = self._written()
        self._trained.check_kinds(suspects)
        if changed := self._changed(suspects):
            raise errors.UserError(
                f"the script has changed the parameter {changed} itself: the servers hold the "
                "weights of what is trained, so the change would be lost. Set weights before ctx.prepare, or "
                f"with ctx.load; put back what is swapped in for an evaluation before the next batch {_SEE}"
            )
        if suspects and self._weights.in_place is not None:
            self._weights.in_place.take_back(sorted(suspects))
        if self._own() or suspects:
            self._begin()

    def script_failed(self) -> None:
        """The script ends with an error: :meth:`leaving` says nothing."""
        self._failed = True

    def leaving(self) -> None:
        """The script has ended: warns if it has written to parameters after its last step."""
        if self._failed:
            return
        if changed := self._changed(self._written()):
            log.warning(
                f"the script has changed the parameter {changed} after its last step: the job's result, its "
                f"checkpoints and other workers do not have this change {_SEE}"
            )
        self._own()

    def _written(self) -> set[int]:
        """The trained parameters that the script may have written to."""
        in_place = self._weights.in_place
        return {*self._trained.suspects(), *(in_place.find_written() if in_place is not None else ())}

    def _another(self) -> str:
        """The name of a trained parameter in whose place there is one now that nobody trains; empty: there is none."""
        if not self._may_be_another:
            return ""
        self._may_be_another = False
        trained = self._of(Kind.PARAMETER)
        names, known = (
            {self._name(index) for index in trained},
            {id(self._binding.parameters[index]) for index in trained},
        )
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if name in names and parameter.requires_grad and id(parameter) not in known:
                return name
        return ""

    def _own(self) -> bool:
        """Whether the script has written to parameters that the optimizer does not have; logs a warning if so."""
        own = self._frozen.suspects()
        self._frozen.check_kinds(own)
        if own:
            self._say(
                "own",
                f"the script writes to the parameter {self._name(own[0])!r}, which the optimizer does not have: it is "
                "this worker's own, and servers, checkpoints, the saved result and a job that goes back keep its first "
                f"value {_SEE}",
            )
        return bool(own)

    def _changed(self, suspects: set[int]) -> str:
        """Which of these parameters have other values than the servers', in words; empty: none, as far as is known."""
        if not suspects:
            return ""
        originals = self._weights.originals(suspects)
        if originals is None:
            self._say(
                "past",
                f"the script has written to the parameter {self._name(min(suspects))!r}, and the servers are past that "
                f"version: unless it has put the weights back, the change is lost {_SEE}",
            )
        changed = self._binding.differ(originals or {})
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        return f"{self._name(changed[0])!r}{more}" if changed else ""

    def buffers(self) -> None:
        """A slice begins, with the buffers of its version."""
        self._binding.reset_buffers()
        if name := self._binding.written_buffer:
            self._say(
                "buffer",
                f"the buffer {name!r} has been written to outside of a slice: every slice begins with the buffers of "
                "its version, so unless it was put back, that is lost; a forward pass in training mode does so, too "
                "(see docs/training.md, Buffers)",
            )

    def _name(self, index: int) -> str:
        return self._binding.specs[index].name

    def _say(self, what: str, sentence: str) -> None:
        """Log a warning, once for each ``what``."""
        if what not in self._told:
            self._told.add(what)
            log.warning(sentence)
