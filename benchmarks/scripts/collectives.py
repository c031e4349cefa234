"""Times all-reduces of two backends in the same processes, one after the other: BYTES … --rounds N --out FILE."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

BACKENDS = ("paramserver", "gloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("paramserver")
    groups = {"paramserver": None, "gloo": dist.new_group(backend="gloo")}
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds: dict[str, dict[str, list[float]]] = {}
    for nbytes in args.sizes:
        times: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for number in range(args.rounds + 1):
            for name in BACKENDS:
                tensor = torch.full((nbytes // 4,), float(rank))
                dist.barrier(groups[name])
                began = time.perf_counter()
                dist.all_reduce(tensor, group=groups[name])
                if number:  # the first one opens connections
                    times[name].append(time.perf_counter() - began)
                assert tensor[0] == tensor[-1] == size * (size - 1) / 2
        seconds[str(nbytes)] = times
    if rank == 0:
        args.out.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
