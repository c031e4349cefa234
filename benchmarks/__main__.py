"""`python -m benchmarks NAME`: runs one benchmark and prints its rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    agg,
    apply,
    blame,
    calib,
    charlm,
    checkpoint,
    collectives,
    compress,
    counts,
    ctrl,
    exchange,
    host_tier,
    incast,
    load,
    mem,
    parity,
    replicas,
    start,
    step_ideal,
    step_overlap,
    straggle,
    train,
    watch,
    wire_bw,
)
from benchmarks.rows import Row, table, write

# By name: a function that takes the number of repetitions and returns rows. It raises RuntimeError if a run fails or
# has a wrong result.
BENCHMARKS: dict[str, Callable[[int], list[Row]]] = {
    "agg": agg.run,
    "apply": apply.run,
    "blame": blame.run,
    "calib": calib.run,
    "charlm": charlm.run,
    "charlm_compiled": charlm.compiled,
    "charlm_stale": charlm.stale,
    "checkpoint": checkpoint.run,
    "collectives": collectives.run,
    "compress": compress.run,
    "counts": counts.run,
    "ctrl": ctrl.run,
    "ctrl_real": ctrl.real,
    "exchange": exchange.run,
    "host_tier": host_tier.run,
    "incast": incast.run,
    "load": load.run,
    "mem": mem.run,
    "parity": parity.run,
    "replicas": replicas.run,
    "start": start.run,
    "step_ideal": step_ideal.run,
    "step_overlap": step_overlap.run,
    "straggle": straggle.run,
    "train": train.run,
    "watch": watch.run,
    "wire_bw": wire_bw.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--repetitions", type=int, default=3, help="how often each variant runs (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, as a JSON list")
    args = parser.parse_args()
    try:
        found = BENCHMARKS[args.name](max(1, args.repetitions))
    except RuntimeError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 1
    if found:
        print(table(found))
    if args.json:
        write(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
