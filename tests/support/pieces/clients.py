"""Pieces for scripts that push and pull with `ps.Client`; they take the place of the whole training script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.support.pieces.base import Need, Piece, Verdict

_TEXT = """\
import os
import sys

import numpy as np
import torch

import paramserver as ps

seen, found = [], {}
client = ctx = ps.Client()
$begin
found["first"] = client.init($arrays$how)
for step in range($count + 2):
    weights = client.pull()
    seen.append(weights)
    client.push($push)
found.update(seen=seen, last=client.pull(), version=client.version)
torch.save(found, f"{os.environ.get('FOUND', 'found')}-0.pt")
$end"""
_PLAIN = {
    "text": _TEXT,
    "begin": "",
    "arrays": "{'a': np.zeros(3), 'b': np.ones((2, 2), np.float32)}",
    "how": "",
    "push": "{name: value * 0.5 + 1 for name, value in weights.items()}",
}
# How else they may differ.
_ENDS = frozenset({"close", "no close", "close twice", "sys.exit(0) at the end", "sys.exit(3) at the end"})


def _piece(name: str, *says: str, **slots: str) -> Piece:
    verdict = Verdict.REFUSED if says else Verdict.EQUAL
    return Piece("client", name, {**_PLAIN, **slots}, verdict, says, needs=(Need.SINGLE,))


def clients(training: Mapping[str, Sequence[Piece]]) -> list[Piece]:
    """The pieces; those of training scripts do not go with them, except for how a script ends."""
    without = tuple(kind for kind in training if kind != "end")
    without += tuple(p.label for p in training["end"] if p.name not in _ENDS)
    return [_CLIENTS[0], *(replace(p, without=without) for p in _CLIENTS[1:])]


_CLIENTS = [
    Piece("client", "none"),
    _piece("sum"),
    _piece("no dimension", arrays="{'a': np.array(2.0), 'b': np.zeros(2)}"),
    _piece(
        "NumPy's own numbers", arrays="{'a': np.zeros(()), 'b': np.zeros(2)}", push="{'a': np.asarray(np.float64(1.5))}"
    ),
    _piece("tensors", arrays="{'a': torch.zeros(3), 'b': torch.ones(2, 2, dtype=torch.float64)}"),
    _piece("tensors of no dimension", arrays="{'a': torch.tensor(1.0), 'b': torch.ones(2)}"),
    _piece("sgd", how=", optimizer='sgd', lr=0.1, momentum=0.9"),
    _piece("adam", how=", optimizer='adam', lr=0.1"),
    _piece("adagrad", how=", optimizer='adagrad', lr=0.1, lr_decay=0.1"),
    _piece("an optimizer of torch", how=", torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.5)"),
    _piece("names left out", push="{'a': np.ones(3)} if step % 2 else {'b': weights['b']}"),
    _piece("nothing pushed", push="{}"),
    _piece("transposed", arrays="{'a': np.arange(6.0).reshape(2, 3).T}", push="{'a': np.ones((2, 3)).T}"),
    _piece("no element", arrays="{'a': np.zeros((0, 3)), 'b': np.zeros(2)}"),
    _piece("every second", arrays="{'a': np.arange(6.0)[::2]}", push="{'a': np.arange(6.0)[::-2]}"),
    _piece("integers", "float32 and float64", arrays="{'a': np.zeros(3, int)}"),
    _piece("half precision", "float32 and float64", arrays="{'a': np.zeros(3, np.float16)}"),
    _piece("no arrays", "nothing to serve", arrays="{}"),
    _piece("unknown name", "no array", push="{'c': np.ones(3)}"),
    _piece("other shape", "has shape", push="{'a': np.ones(4)}"),
    _piece("other type", "gradient is float32", push="{'a': np.ones(3, np.float32)}"),
    _piece("not finite", "NaN", push="{'a': np.full(3, np.nan)}"),
    _piece("no samples", "samples", push="{'a': np.ones(3)}, samples=0"),
    _piece("push before init", "init", begin="client.push({'a': np.ones(3)})\n"),
    _piece("init twice", "already", begin="client.init({'a': np.zeros(3)})\n"),
    _piece("unknown optimizer", "is not supported", how=", optimizer='lbfgs'"),
    _piece("unknown hyper-parameter", "sgd", how=", optimizer='sgd', speed=3"),
    _piece("a rate below zero", "learning rate", how=", optimizer='sgd', lr=-1.0"),
    _piece("a list", "list", arrays="{'a': [1.0, 2.0]}"),
]
