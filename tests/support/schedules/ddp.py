"""A script that accumulates gradients under torch's DDP, as users write it: one of two processes with gloo."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Subset

from paramserver.core.work.slices import DataSpec, SyncSchedule, slice_indices
from tests.support.cluster.programs import adamw, dataset, network

BATCH, EPOCHS, ACCUMULATE, RANKS = 3, 2, 4, 2
# 20 batches: two steps of two times four, and a step of two times two.
UNEVEN = 60


def samples_of(rank: int, epoch: int) -> list[int]:
    """The samples of a rank in the order of an epoch: those that paramserver gives to this worker."""
    spec = DataSpec(UNEVEN, BATCH * ACCUMULATE, batches=ACCUMULATE, slices_per_step=RANKS)
    schedule = SyncSchedule(spec.slices_per_epoch, RANKS)
    steps = (schedule.step(version) for version in range(schedule.steps_per_epoch))
    return [sample for step in steps for sample in slice_indices(spec, 0, epoch, step.slices[rank])]


def main(rank: int, place: Path) -> None:
    """Train; rank 0 writes the model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=RANKS)
    model = DistributedDataParallel(network())
    optimizer = adamw(model.parameters())
    schedule = OneCycleLR(optimizer, 0.05, total_steps=EPOCHS * 3)
    for epoch in range(EPOCHS):
        loader = DataLoader(Subset(dataset(UNEVEN), samples_of(rank, epoch)), batch_size=BATCH)
        for i, (x, y) in enumerate(loader):
            due = (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader)
            with nullcontext() if due else model.no_sync():
                (F.cross_entropy(model(x), y) / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
            if due:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    if rank == 0:
        torch.save(model.module.state_dict(), place / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
