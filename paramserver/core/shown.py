"""Text of others made harmless, before people see it: on terminals, in logs, on pages and in reports.

Names, addresses, reasons and failures come from other processes. Whoever writes such a text could otherwise steer the
terminal of the reader, forge a line of a log, or turn the order of letters around.
"""

from __future__ import annotations

import re
from typing import Any

# Control characters, separators of lines, marks that change the direction of writing, and halves of characters.
_STEERS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_KEPT = "\n\t"


def one_line(text: str) -> str:
    r"""The text as one line. A character that would steer the terminal is shown by its number.

    >>> one_line("gone\n\x1b[2Jall is well")
    'gone\\n\\x1b[2Jall is well'
    """
    return text if text.isascii() and text.isprintable() else _STEERS.sub(_number, text)


def lines(text: str) -> str:
    r"""The same for a text of several lines, which keeps them and its tabs.

    >>> lines("one\ntwo\x07")
    'one\ntwo\\x07'
    """
    return _STEERS.sub(lambda found: found[0] if found[0] in _KEPT else _number(found), text)


def indented(text: str) -> str:
    r"""The same, for a log: a line that follows begins with spaces, so that it looks like no line of its own.

    >>> indented("one\ntwo")
    'one\n    two'
    """
    return lines(text).replace("\n", "\n    ")


def values(found: Any) -> Any:
    """The texts in lists and mappings, at any depth, each as one line. Other values stay as they are.

    >>> values({"why": ["a\\nb", 3]})
    {'why': ['a\\\\nb', 3]}
    """
    if isinstance(found, str):
        return one_line(found)
    if isinstance(found, dict):
        return {values(key): values(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [values(one) for one in found]
    return found


def _number(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
