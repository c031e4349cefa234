"""What is known to fail, and is not drawn until it is repaired."""

from __future__ import annotations

from dataclasses import dataclass

from tests.behaviour.generate import Script


@dataclass(frozen=True, slots=True)
class Known:
    """Scripts with all of these pieces. ``why``: what happens, and whose it is."""

    labels: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return f"{' and '.join(self.labels)}: {self.why}"


KNOWN: list[Known] = [
    Known(("model=a second model",), "item 7: accepted"),
    Known(("model=expanded",), "items 7 and 17: accepted"),
    Known(("model=overlapping views",), "item 7: they come apart"),
    Known(("optimizer=a second optimizer",), "item 7: trains the first model"),
    *(
        Known(("model=left out of the optimizer", f"state={name}"), "what a script writes to it is not saved")
        for name in ("weights changed once", "weights changed through data", "another tensor for a weight")
    ),
    Known(("model=left out of the optimizer", "state=weights clipped in each step"), "what is written is not saved"),
    Known(("client=no dimension",), "item 17: comes back with shape (1,)"),
    Known(("client=NumPy's own numbers",), "item 17: comes back with shape (1,)"),
    Known(("client=a list",), "an AttributeError"),
    Known(("model=meta",), "item 17: an error of torch"),
]


def known(script: Script) -> bool:
    """Whether it is known that this script fails."""
    return any(all(script.has(label) for label in one.labels) for one in KNOWN)
