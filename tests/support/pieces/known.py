"""What is known to fail, and is not drawn until it is repaired."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.behaviour.generate import Script


@dataclass(frozen=True, slots=True)
class Known:
    """Scripts with all of these pieces. ``why``: what happens, and whose it is."""

    labels: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return f"{' and '.join(self.labels)}: {self.why}"


KNOWN: list[Known] = []


def known(script: Script) -> bool:
    """Whether it is known that this script fails."""
    return any(all(script.has(label) for label in one.labels) for one in KNOWN)
