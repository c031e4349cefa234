"""``paramserver chaos``: a run with planned faults, and a report of its result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paramserver.cli.common import shows, tell
from paramserver.errors import ConfigError

if TYPE_CHECKING:
    from paramserver.testing.seeded import Shape


def chaos(
    *,
    plan: Path | None = None,
    seed: int | None = None,
    faults: int | None = None,
    kinds: Annotated[str | None, shows("KIND,...")] = None,
    shape: Annotated[str | None, shows("SERVERS,WORKERS,STEPS")] = None,
    no_twin: bool = False,
    allow_unfired: bool = False,
    report: Path | None = None,
    print_plan: bool = False,
    script_args: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
    """Train under faults, and see whether the result is the same.

    The command stands after "--": paramserver chaos --seed 7 --faults 20 -- run train.py --workers 3. The same run
    without faults comes first; the results are compared. Ends with 0 if the run ended well, every planned fault struck,
    no contribution was lost or counted twice, and (in synchronous mode) weights, optimizer state and buffers are equal.

    Parameters
    ----------
    plan
        TOML file with the faults (see docs/chaos.md).
    seed
        Make a plan instead: the same one every time for this seed, --faults, --kinds and the same cluster.
    faults
        How many faults to plan.
    kinds
        Only faults of these kinds, as worker,server,network (and coordinator, store, storage).
    shape
        Servers, workers and steps that the plan is made for, as 2,3,100; otherwise those of the run without faults.
    no_twin
        Do not run without faults first; then nothing is compared.
    allow_unfired
        A fault that never struck is no failure.
    report
        Write the report to this JSON file, too.
    print_plan
        Only print the plan, as TOML, and end.
    """
    from paramserver.testing.chaos import Options, check_command
    from paramserver.testing.chaos import chaos as run_chaos
    from paramserver.testing.plan import Plan, load
    from paramserver.testing.seeded import KINDS, made

    if (plan is None) == (seed is None):
        raise ConfigError("give either --plan FILE, or --seed and --faults, to say which faults are to strike")
    if plan is not None and (faults is not None or kinds is not None or shape is not None):
        raise ConfigError("--faults, --kinds and --shape go with --seed; a plan file says everything itself")
    if seed is not None and faults is None:
        raise ConfigError("--seed needs --faults, the number of faults to plan")
    fixed = _shape(shape) if shape is not None else None
    chosen = kinds.split(",") if kinds is not None else KINDS
    known = load(plan) if plan is not None else None
    if seed is not None and fixed is None and (no_twin or print_plan):
        raise ConfigError("without a run that shows them, --shape must say servers, workers and steps, as 2,3,100")

    def choose(found: Shape | None) -> Plan:
        if known is not None:
            return known
        made_for = fixed or found
        assert seed is not None
        assert faults is not None
        assert made_for is not None
        return made(seed, faults, made_for, chosen)

    if fixed is not None:
        choose(fixed)  # mistakes are told before anything runs
    if print_plan:
        tell(choose(None).to_toml(), end="")
        return 0
    command = script_args or []
    check_command(command)
    options = Options(choose, not no_twin, allow_unfired, report)
    return run_chaos(command, options, say=lambda line: tell(line, flush=True))


def _shape(text: str) -> Shape:
    from paramserver.testing.seeded import Shape

    try:
        servers, workers, steps = (int(word) for word in text.split(","))
        if min(servers, workers, steps) < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--shape is servers,workers,steps, as 2,3,100, not {text!r}") from None
    return Shape(servers, workers, steps)
