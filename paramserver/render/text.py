"""Settings and documents as text: TOML, environment variables, YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from paramserver.config import SECTIONS, env_name

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


class Octal(int):
    """A mode of a file, written with a leading 0."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Every value in full, without references to other places."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _represent_octal(dumper: yaml.SafeDumper, mode: Octal) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:int", f"0{mode:o}")


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Octal, _represent_octal)


def comment(text: str) -> str:
    """The lines of `text` as a comment, which TOML, YAML, units and environment files write alike."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.strip("\n").split("\n"))


def yaml_text(head: str, documents: Iterable[Mapping[str, Any]]) -> str:
    """Documents as one stream, under a comment."""
    parts = [
        yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
        for document in documents
    ]
    return comment(head) + "---\n".join(parts)


def toml_text(head: str, values: Mapping[str, object]) -> str:
    """Settings by dotted name as a configuration file, under a comment."""
    blocks = [comment(head).rstrip("\n")] if head else []
    for section in SECTIONS:
        lines = [f"{key.partition('.')[2]} = {_json(value)}" for key, value in values.items() if _is_in(key, section)]
        if lines:
            blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def environment(values: Mapping[str, object]) -> dict[str, str]:
    """Settings by dotted name as environment variables."""
    return {env_name(key): value if isinstance(value, str) else _json(value) for key, value in values.items()}


def environment_file(head: str, values: Mapping[str, object]) -> str:
    """Settings as a file for EnvironmentFile= of systemd, which a shell reads as well."""
    lines = [f"{name}={_shell_word(value)}\n" for name, value in environment(values).items()]
    return comment(head) + "".join(lines)


def unit_words(words: Sequence[str]) -> str:
    """A command line for ExecStart= of systemd. Text that systemd would expand or split is quoted."""
    return " ".join(_unit_word(word) for word in words)


def double_dollars(value: Any) -> Any:
    """A part of a document for docker-compose or Kubernetes, which take $ for the beginning of a variable."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: double_dollars(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [double_dollars(one) for one in value]
    return value


def _is_in(key: str, section: str) -> bool:
    return key.startswith(f"{section}.")


def _json(value: object) -> str:
    # JSON's numbers, truth values, strings and lists are TOML's, too.
    return json.dumps(value, ensure_ascii=False)


def _shell_word(text: str) -> str:
    if _PLAIN_WORD.fullmatch(text):
        return text
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'


def _unit_word(text: str) -> str:
    word = text.replace("%", "%%").replace("$", "$$")
    if _PLAIN_WORD.fullmatch(text):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'
