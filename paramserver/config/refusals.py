"""Messages about settings that are wrong or unknown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from paramserver.config.secrets import ENVIRONMENT_ONLY, hide_password
from paramserver.config.settings import ENV_PREFIX, FIELDS, must_be


def unknown(name: str, known: Sequence[str] | Mapping[str, Any], kind: str = "setting") -> str:
    """The message that there is no setting of that name, with the nearest name."""
    # The right key in the wrong section ("training.staleness") is nearer than a similar spelling.
    near = [key for key in known if kind == "setting" and _key_part(key) == _key_part(name)]
    if not near:
        bare = {key.removeprefix(ENV_PREFIX): key for key in known}
        near = [bare[key] for key in difflib.get_close_matches(name.removeprefix(ENV_PREFIX), bare, n=1)]
    hint = f'did you mean "{near[0]}"?' if near else '"paramserver config show" lists what there is'
    return f'"{name}" is not a {kind}; {hint}'


def _key_part(name: str) -> str:
    return re.split(r"\.|__", name)[-1]


def explain(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """One sentence per wrong setting; a union reports the same setting once per member."""
    texts: dict[str, str] = {}
    for item in error.errors(include_url=False):
        if not item["loc"]:  # about several settings, and named in the text
            texts[item["msg"]] = item["msg"].removeprefix("Value error, ")
            continue
        key = ".".join(str(part) for part in item["loc"][:2])
        assert key in FIELDS, f"a section cannot be wrong as a whole, since only known keys get here: {item}"
        verb = "holds" if key == "run.args" and len(item["loc"]) > 2 else "is"
        where = origins.get(key, "default")
        texts.setdefault(key, f"{key} {verb} {written(key, item['input'])} ({where}), but must be {must_be(key)}")
    return list(texts.values())


def written(key: str, value: object) -> str:
    """The value as a user may have written it, without its secrets."""
    if key in ENVIRONMENT_ONLY:
        return "what it is"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    if "://" in text:
        text = hide_password(text)
    return text if len(text) <= 80 else text[:77] + "..."
