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
    Known(("loop=range",), "item 5: batches in the first pass only"),
    Known(("loop=while",), "item 5"),
    Known(("loop=while, ends in an epoch",), "item 5"),
    Known(("loop=two range loops",), "item 5"),
    Known(("loop=break",), "item 5: the next epoch begins where the one before was left"),
    Known(("loop=break under range",), "item 5"),
    Known(("loop=islice",), "item 5"),
    Known(("loop=two passes in an epoch",), "item 5: the second pass is empty"),
    Known(("state=model loaded after prepare",), "item 6: undone at the next version"),
    Known(("state=model loaded between epochs",), "item 6: undone at the next version"),
    Known(("state=weights changed once",), "item 6: undone at the next version"),
    Known(("state=weights changed through data",), "item 6: undone at the next version"),
    Known(("state=another tensor for a weight",), "item 6: undone at the next version"),
    Known(("state=weights clipped in each step",), "item 6: undone at the next version"),
    Known(("model=a second model",), "item 7: accepted"),
    Known(("model=expanded",), "items 7 and 17: accepted"),
    Known(("model=overlapping views",), "item 7: they come apart"),
    Known(("optimizer=a second optimizer",), "item 7: trains the first model"),
    Known(("model=meta",), "item 17: an error of torch"),
]


def known(script: Script) -> bool:
    """Whether it is known that this script fails."""
    return any(all(script.has(label) for label in one.labels) for one in KNOWN)
