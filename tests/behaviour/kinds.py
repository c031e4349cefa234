"""All pieces, by kind, the plainest first."""

from __future__ import annotations

from tests.behaviour.clients import clients
from tests.behaviour.data import DATA
from tests.behaviour.loops import BODIES, ENDS, FAULTS, LOOPS
from tests.behaviour.models import MODELS, TYPES
from tests.behaviour.optimizers import FLAGS, GROUPS, OPTIMIZERS, PRECISIONS, SCHEDULERS
from tests.behaviour.pieces import Piece
from tests.behaviour.states import KEEPS, STATES

_ALL = (
    *(LOOPS, BODIES, MODELS, TYPES, OPTIMIZERS, GROUPS, FLAGS, STATES, SCHEDULERS, PRECISIONS, DATA, KEEPS, ENDS),
    FAULTS,
)
_TRAINING: dict[str, list[Piece]] = {pieces[0].kind: pieces for pieces in _ALL}
KINDS: dict[str, list[Piece]] = {**_TRAINING, "client": clients(_TRAINING)}


def piece(label: str) -> Piece:
    """The piece of this label. Raises KeyError if there is none."""
    kind, _, name = label.partition("=")
    return {p.name: p for p in KINDS[kind]}[name]
