"""All pieces, by kind, the plainest first."""

from __future__ import annotations

from tests.support.pieces.base import Piece
from tests.support.pieces.clients import clients
from tests.support.pieces.data import DATA
from tests.support.pieces.loops import BODIES, ENDS, FAULTS, LOOPS
from tests.support.pieces.models import MODELS, TYPES
from tests.support.pieces.optimizers import FLAGS, GROUPS, OPTIMIZERS, PRECISIONS, SCHEDULERS
from tests.support.pieces.states import KEEPS, STATES

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
