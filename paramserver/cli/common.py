"""Parts that commands share: one line per error, exit codes, and ``--set section.key=value``."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, TextIO, Union, get_args, get_origin

from cyclopts import Parameter

from paramserver.config import FIELDS, Settings, load_settings
from paramserver.config import shown as shown_value
from paramserver.core import shown
from paramserver.errors import ConfigError, ParamServerError

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
# Reasons why standard output takes no more.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def complain(text: str) -> None:
    """Print an error the way all commands do."""
    from paramserver import logs  # help and settings load nothing heavy

    logs.complain(f"paramserver: error: {text}")


def tell(text: str = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print a text, which may name what other processes have said: it steers no terminal."""
    print(shown.lines(text), end=end, file=file, flush=flush)


def flag(key: str, metavar: str = "") -> Parameter:
    """A flag for the setting ``key``: the help shows the kind of its values, and the default of the setting.

    Values are checked by `paramserver.config` alone, whether they come from a flag, the environment or a file. Commands
    therefore take the values as text, and "-1" is a value rather than a flag.
    """
    field = FIELDS[key]
    default = shown_value(key, field.default)
    return Parameter(
        allow_leading_hyphen=True,
        metavar=metavar or kind(field.annotation),
        show_default=False if default in ("", None) else str(default),
    )


def shows(metavar: str, name: str | None = None, leading_hyphen: bool = False) -> Parameter:
    """A flag whose help shows ``metavar`` as the kind of its values: "NAME", "HOST:PORT"."""
    return Parameter(name=name, metavar=metavar, allow_leading_hyphen=leading_hyphen)


def kind(annotation: object) -> str:
    """The kind of values that a type has, for the help: "INT", "NUMBER", "TEXT", "sync|async"."""
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return "|".join(kind(part) for part in get_args(annotation) if part is not type(None))
    return _KINDS.get(annotation, "TEXT")


# Types of flags that several commands have. Sets: settings, each as section.key=value.
Sets = Annotated[list[str] | None, shows("SECTION.KEY=VALUE", name="--set")]
# Name: of a job, an image, a class of volumes. Address: of a coordinator.
Name = Annotated[str | None, shows("NAME")]
Address = Annotated[str | None, shows("HOST:PORT")]
Directory = Annotated[str | None, shows("DIRECTORY")]

_KINDS: Mapping[object, str] = {int: "INT", float: "NUMBER", bool: "true|false"}


def have_streams() -> None:
    """Open what the caller has closed (``>&-``): a file that is opened later must not become standard output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, as the lower ones are open
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115  # to the end


def guard(command: Callable[[], int]) -> int:
    """The exit code of `command`. Errors raised on purpose become one line; a bug of ours keeps its traceback."""
    try:
        code = command()
        sys.stdout.flush()
        logs = sys.modules.get("paramserver.logs")  # of commands that train; the others need not wait for its import
        return code or (1 if logs is not None and logs.unwritten() is not None else 0)
    except ParamServerError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # The reader of our output has gone (`paramserver status | head`): there is nobody to tell.
        _forget_output()
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise  # a bug of ours: who opens files says what is wrong with them
        _forget_output()
        complain(f"the output cannot be written: {error.strerror}")
        return USAGE_EXIT_CODE


def _forget_output() -> None:
    """Throw the unwritten output away; otherwise Python would try to write it again at the end, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_assignments(assignments: Iterable[str]) -> dict[str, object]:
    """``["consistency.mode=async"]`` as overrides for load_settings. Raises ConfigError for anything else."""
    overrides: dict[str, object] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise ConfigError(f'"{assignment}" is not an assignment; write it as section.key=value')
        if key in overrides:
            raise ConfigError(f"{key} is set twice; set it once")
        overrides[key] = value
    return overrides


def load_job(config: Path | None, overrides: Mapping[str, object]) -> Settings:
    """The settings of a new job; a job that goes on from a checkpoint takes over settings of the checkpoint."""
    settings = load_settings(config, overrides)
    if not settings.checkpoint.resume:
        return settings
    from paramserver.resume.checkpointing import resumed

    return load_settings(config, {**overrides, **resumed(settings)})


def merge_overrides(flags: Mapping[str, object], assignments: Mapping[str, object]) -> dict[str, object]:
    """Flags (None: not given) and ``--set`` assignments as one. Raises ConfigError if both give the same setting."""
    given = {key: value for key, value in flags.items() if value is not None}
    twice = [key for key in given if key in assignments]
    if twice:
        raise ConfigError(f"{twice[0]} is given by a flag and by --set; give it once")
    return {**given, **assignments}
