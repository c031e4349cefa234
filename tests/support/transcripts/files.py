"""Transcripts: text files with commands, a line ``----``, and everything that follows from the commands.

Paragraphs are separated by an empty line. A paragraph whose lines begin with ``#`` is for readers. Any other one is a
*block*: commands, the line, and the output of these commands, each after its command if there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_LINE = "----"

Run = Callable[[str], Sequence[str]]


def replayed(text: str, run: Run) -> str:
    """The text with the output that ``run`` gives for the commands of each block.

    Raises ValueError for a block without the line ``----``.
    """
    paragraphs = [part.strip("\n") for part in text.strip("\n").split("\n\n")]
    return "\n\n".join(part if part.startswith("#") else _block(part, run) for part in paragraphs) + "\n"


def _block(block: str, run: Run) -> str:
    lines = block.splitlines()
    if _LINE not in lines:
        raise ValueError(f"there is no line {_LINE} after {lines[0]!r}")
    commands = lines[: lines.index(_LINE)]
    output: list[str] = []
    for command in commands:
        if len(commands) > 1:
            output.append(f"> {command}")
        output += run(command) or ["nothing changes"]
    return "\n".join([*commands, _LINE, *output])
