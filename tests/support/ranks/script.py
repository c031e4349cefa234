"""A script for DDP as people write them: BACKEND RESULT [FLAG [wait]]. Rank 0 writes the weights to RESULT.

If FLAG is given and is no file yet, rank 1 makes the file in the middle of training and kills itself. With "wait"
nobody kills itself: all ranks wait there until there is a file FLAG.go.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


def main() -> None:
    backend, result, *flag = sys.argv[1:]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import paramserver.distributed  # noqa: F401
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP gives all ranks the weights of rank 0
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        x = torch.randn(8 * size, 10, generator=generator)[rank::size]
        model(x).sub(x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "wait" in flag and step == STEPS // 2:
            print(f"rank {rank} waits", flush=True)
            while not Path(f"{flag[0]}.go").exists():
                time.sleep(0.02)
        elif flag and step == STEPS // 2 and rank == 1 and not Path(flag[0]).exists():
            Path(flag[0]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    seen: list[object] = [None] * size
    dist.all_gather_object(seen, {"rank": rank})
    assert seen == [{"rank": one} for one in range(size)]
    if rank == 0:
        torch.save(model.module.state_dict(), result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
