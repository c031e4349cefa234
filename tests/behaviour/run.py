"""Random scripts, one after the other: ``python -m tests.behaviour.run --scripts 1000``, ``--seed 17`` for one."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.behaviour.generate import Form, Script, draw, fits, of_labels, render, simpler
from tests.support.behaviour.judge import WRONG, judge
from tests.support.behaviour.play import play, play_plain
from tests.support.pieces.known import KNOWN, known


def trial(script: Script) -> str:
    """What is wrong with what becomes of a script, or nothing."""
    text = render(script)
    with tempfile.TemporaryDirectory(prefix="behaviour-") as name:
        place = Path(name)
        return judge(script, play_plain(text, script.form, place), play(text, script.form, place))


def smallest(script: Script, fails: Callable[[Script], bool]) -> Script:
    """A script that fails like this one, from which nothing can be taken away."""
    while True:
        found = next((one for one in simpler(script) if fits(one.form, one.pieces) and fails(one)), None)
        if found is None:
            return script
        script = found


def report(script: Script, problem: str, shrink: bool = True) -> str:
    """What a failing script is reported with."""

    def fails(one: Script) -> bool:
        found = trial(one)
        return bool(found) and found.startswith(WRONG) == problem.startswith(WRONG)

    small = smallest(script, fails) if shrink else script
    return (
        f"{script}\n{problem}\n\nwithout what does not matter: {small}\n{trial(small)}\n\n{render(small)}\n"
        f"again: python -m tests.behaviour.run --seed {script.seed}{' --real' * script.form.real}\n"
    )


def main() -> int:
    """Exit code 1 if a script fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--pieces", nargs="+", help="only one, of these pieces, as in loop=range model=tied")
    parser.add_argument("--form", nargs="+", default=[], help="with --pieces: servers=2 workers=2 slices=4 mode=async")
    parser.add_argument("--print", action="store_true", help="print the script, and do not run it")
    parser.add_argument("--known", action="store_true", help="list what is known to fail, and is not drawn")
    parser.add_argument("--with-known", action="store_true", help="draw it nevertheless")
    parser.add_argument("--no-shrink", action="store_true", help="report scripts as they were drawn")
    parser.add_argument("--real", action="store_true", help="in real processes, some of which are killed")
    args = parser.parse_args()
    if args.known:
        print("\n".join(str(one) for one in KNOWN) or "nothing is known to fail")
        return 0
    left_out = (lambda script: False) if args.with_known else known
    seeds = range(args.first, args.first + args.scripts) if args.seed is None else [args.seed]
    scripts = (draw(seed, left_out, args.real) for seed in seeds)
    if args.pieces:
        pairs = (one.split("=") for one in args.form)
        form: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, value in pairs}
        scripts = (of_labels(args.pieces, Form(**form)) for _ in range(1))
    failed, count, begun = 0, 0, time.monotonic()
    for script in scripts:
        if args.print:
            print(render(script))
            continue
        count += 1
        if problem := trial(script):
            failed += 1
            print(report(script, problem, not args.no_shrink), flush=True)
    print(f"{count} scripts in {time.monotonic() - begun:.1f} s, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
