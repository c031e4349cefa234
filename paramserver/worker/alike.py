"""Whether all workers run the same script: its file, the modules beside it, and its arguments."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.wire.messages import OF_RUN

log = structlog.get_logger("paramserver.worker")

# A number that travels as float64 has so many bits.
_BITS = 52
# So many files are compared one by one.
_MOST = 100
# The name of the script for the comparison, whatever the file is called.
_SCRIPT = "the script"
_PACKAGES = frozenset({"site-packages", "dist-packages"})


class _Agreeing(Protocol):
    def agree_all(self, name: str, place: tuple[int, int], value: float) -> Mapping[tuple[int, int], float]:
        """Give a number for this place; returns all numbers of the name."""


def compare(agreeing: _Agreeing, run: str, chosen: str) -> None:
    """Raises UserError that names the first file or argument which the job's first worker has otherwise.

    ``run``: a word for this run of the job. ``chosen``: the value of ``training.same_script``. Digests travel, and
    neither files nor arguments.
    """
    parts = list(_parts(sys.modules.get("__main__"), sys.argv[1:], list(sys.modules.values())))
    if not parts:
        return
    name = f"{OF_RUN}{run} script"
    numbers = [float(number_of(run, value)) for _, value in parts]
    total = float(number_of(run, *map(str, numbers)))
    theirs = agreeing.agree_all(name, (1, 0), total)
    if theirs[1, 0] == total and len(theirs) > 1:
        return
    told = False
    for (what, _), mine in zip(parts, numbers, strict=True):
        place = 1, number_of(_SCRIPT if what == parts[0][0] else what)
        theirs = theirs if place in theirs else agreeing.agree_all(name, place, mine)
        if theirs[place] != mine and not (told and _may_differ(what, chosen)):
            _differs(what, chosen)
            told = True


def _differs(what: str, chosen: str) -> None:
    said = f"{what} of this worker's script is not that of the worker that came first"
    if _may_differ(what, chosen):
        log.warning(f"{said}; training.same_script is {chosen!r}, so this worker takes part nevertheless")
        return
    do = (
        "put the file back as it was, or stop the job and go on from its checkpoint with the new file (--resume). If "
        'workers are to have different files, set training.same_script to "none"'
        if _is_file(what)
        else "give all workers the same arguments. If they are to differ, for example a path on each host, set "
        'training.same_script to "files"'
    )
    raise errors.UserError(f"{said}, and workers would compute different things: {do}")


def _is_file(what: str) -> bool:
    return not what.startswith(("argument ", "the list of options"))


def _may_differ(what: str, chosen: str) -> bool:
    return chosen == "none" or (chosen == "files" and not _is_file(what))


def number_of(*texts: str | bytes) -> int:
    """A digest of the texts, as a whole number that float64 keeps.

    >>> number_of("a", "b") == number_of("ab")
    False
    """
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        digest.update(len(data).to_bytes(8, "big") + data)
    return int.from_bytes(digest.digest()[:8], "big") >> (64 - _BITS)


def _parts(
    main: ModuleType | None, arguments: Sequence[str], modules: Iterable[ModuleType]
) -> Iterator[tuple[str, str | bytes]]:
    """Names and contents: arguments, and files by their paths below the folder of the script."""
    file = getattr(main, "__file__", None)
    if not file or not os.path.isfile(file):
        return  # a notebook, or a prompt
    script, files, folders = Path(file).resolve(), dict[str, Path](), dict[str, Path | None]()
    yield script.name, script.read_bytes()
    for name, value in arguments_by_name(arguments):
        # Files beside the script may lie in another folder on each host.
        yield name, value.replace(str(script.parent), "").replace(str(Path(file).parent.absolute()), "")
    for module in modules:
        place = getattr(module, "__file__", None)
        if not isinstance(place, str) or not place.endswith(".py") or _is_ours(module):
            continue
        folder, _, name = place.rpartition(os.sep)
        if folder not in folders:  # few folders have many modules
            real = Path(folder).resolve()
            below = real.is_relative_to(script.parent) and not _PACKAGES & {*real.parts}
            folders[folder] = real if below else None
        if (real_folder := folders[folder]) is not None and (path := real_folder / name) != script:
            files[path.relative_to(script.parent).as_posix()] = path
    for name, path in sorted(files.items())[:_MOST]:
        with contextlib.suppress(OSError):  # deleted since it was imported
            yield name, path.read_bytes()


def _is_ours(module: ModuleType) -> bool:
    return str(getattr(module, "__name__", "")).partition(".")[0] == "paramserver"


def arguments_by_name(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each argument by its option, or by its place from 1; then all options together.

    >>> list(arguments_by_name(["a.csv", "--lr", "0.1"]))
    [('argument 1', 'a.csv'), ('argument --lr', '0.1'), ('the list of options', '1 --lr')]
    """
    found: list[tuple[str, str]] = []
    waiting = False  # an option may have its value in the next argument
    for number, argument in enumerate(arguments, 1):
        if argument.startswith("-") and len(argument) > 1 and not argument[1].isdigit():
            option, equals, value = argument.partition("=")
            # A short option may have its value, perhaps a secret, in the same word.
            found.append((option, value) if argument.startswith("--") else (argument[:2], argument[2:]))
            waiting = not equals
        elif waiting:
            found[-1], waiting = (found[-1][0], found[-1][1] + argument), False
        else:
            found.append((str(number), argument))
    times: dict[str, int] = {}
    for name, value in found:
        times[name] = times.get(name, 0) + 1
        yield f"argument {name}" + (f" ({times[name]})" if times[name] > 1 else ""), value
    yield "the list of options", " ".join(name for name, _ in found)
