"""Brings the state of registered objects to the coordinator, and puts it back when the job goes back."""

from __future__ import annotations

from typing import Any, Protocol, cast

import structlog

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import coordinator_pb2
from paramserver.worker.engine import Engine
from paramserver.worker.registered.states import packed, unpacked

log = structlog.get_logger("paramserver.worker")

_MAX_BYTES = 512 << 20
_PIECE_BYTES = 2 << 20
_NAME_CHARS = 200
_CALL_S = 60.0
# Asynchronous mode: every so many versions a worker brings the state.
_ASYNC_EVERY = 50


class Stateful(Protocol):
    """An object that may be registered."""

    def state_dict(self) -> Any:
        """Its state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take over a state."""


class Objects:
    """The registered objects of one script."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._objects: dict[str, Stateful] = {}
        # The states with which the objects were registered, for a job that goes back to version 0.
        self._initial: dict[str, bytes] = {}
        # The version at which this worker brought the state last, and how often the job had gone back by then.
        self._brought = -1
        self._undone = 0

    def register(self, name: str, thing: Stateful) -> None:
        """Keep this object. If the job has a state of it already, the object gets it. Raises UserError."""
        if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS or not name.isprintable():
            raise errors.UserError(f"ctx.register takes a name of 1 to {_NAME_CHARS} printable characters, not {name}")
        if name in self._objects:
            raise errors.UserError(f"ctx.register has an object {name!r} already: give each object another name")
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise errors.UserError(
                f"ctx.register takes an object with state_dict() and load_state_dict(), not {type(thing).__name__}"
            )
        self._initial[name] = packed({name: thing.state_dict()})
        self._undone = self._engine.rollback.undone
        known = self._ask(base=False)
        self._objects[name] = thing
        if known is not None and name in known:
            thing.load_state_dict(known[name])
        elif known is None:
            self._bring()

    def look(self) -> None:
        """The script asks for a slice: bring the state if servers copy this version; put it back after going back."""
        if not self._objects:
            return
        self.follow()
        version = self._engine.weights.version
        together = self._engine.modes.present.mode is Mode.SYNC
        due = self._engine.weights.copied if together else version >= self._brought + _ASYNC_EVERY
        if due and version != self._brought:
            self._bring()

    def settle(self) -> None:
        """The script is about to save, to load or to end: the state belongs to the version at hand."""
        if self._objects:
            self.follow()
            self._bring()

    def follow(self) -> None:
        """If the job went back since the last call, the objects get the state of the version with which it goes on."""
        undone = self._engine.rollback.undone
        if undone == self._undone:
            return
        self._undone, self._brought = undone, -1
        known = self._ask(base=True) or {}
        for name, thing in self._objects.items():
            thing.load_state_dict(known[name] if name in known else unpacked(self._initial[name])[name])

    def _bring(self) -> None:
        """Send the state at the version at hand, unless another worker brings it."""
        data = packed({name: thing.state_dict() for name, thing in self._objects.items()})
        if len(data) > _MAX_BYTES:
            raise errors.UserError(f"the registered objects have {len(data)} bytes, and {_MAX_BYTES} are the most")
        member, version = self._engine.member, self._engine.weights.version
        self._brought = version
        session, timeline = member.session, self._engine.shards.timeline
        for offset in range(0, len(data), _PIECE_BYTES):

            def request(offset: int = offset) -> coordinator_pb2.KeepRequest:
                return coordinator_pb2.KeepRequest(
                    member=session.member,
                    timeline=timeline,
                    version=version,
                    total=len(data),
                    offset=offset,
                    data=data[offset : offset + _PIECE_BYTES],
                )

            reply = member.run(session.ask("Coordinator.Keep", request, _CALL_S))
            if not cast(coordinator_pb2.KeepResponse, reply).wanted:
                return

    def _ask(self, base: bool) -> dict[str, Any] | None:
        """The states by name; ``base``: those with which the timeline began, else the newest. None: there are none."""
        member, data, number = self._engine.member, bytearray(), 0
        session = member.session
        while True:

            def request(offset: int = len(data), number: int = number) -> coordinator_pb2.KeptRequest:
                return coordinator_pb2.KeptRequest(member=session.member, base=base, offset=offset, number=number)

            reply = cast(coordinator_pb2.KeptResponse, member.run(session.ask("Coordinator.Kept", request, _CALL_S)))
            if not reply.number:
                return None
            if reply.number != number:  # the first piece, perhaps of a newer state
                data, number = bytearray(), reply.number
            data += reply.data
            if len(data) >= reply.total:
                return unpacked(bytes(data))
