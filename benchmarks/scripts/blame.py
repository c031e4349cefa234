"""The training that `benchmarks.blame` watches: it mostly sleeps, and one worker is kept by a cause on purpose."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paramserver as ps

BATCH, FEATURES, WIDE = 4, 256, 1200
SLICE_S = 0.3
# The worker that is kept, and by which of its batches.
SLOW, WHEN = 1, 6
ONCE_S, ALWAYS_S = 2.0, 0.4
_HOG = "import os\nos.sched_setaffinity(0, {%d})\nwhile os.getppid() == %d: pass"


def burn(seconds: float) -> None:
    """Compute for so long, by this thread's own time, and say how much of a core it got."""
    begun, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < seconds:
        pass
    tell(seconds / (time.monotonic() - begun))


def tell(share: float) -> None:
    """Print the share of the time in which the injected work of this worker had a core."""
    print(f"had a core for {share:.0%} of its time", flush=True)


def collect() -> None:
    """Collect garbage for about as long as the cause is to last: many small objects are looked at again and again."""
    heap = [[number] for number in range(300_000)]
    begun, used = time.monotonic(), time.thread_time()
    while time.monotonic() - begun < ONCE_S:
        gc.collect()
    tell((time.thread_time() - used) / (time.monotonic() - begun))
    del heap


def starve() -> None:
    """Compute a little, on a core that eight other processes want."""
    cores = os.sched_getaffinity(0)
    core = max(cores)
    hogs = [subprocess.Popen([sys.executable, "-c", _HOG % (core, os.getpid())]) for _ in range(8)]
    time.sleep(0.3)
    os.sched_setaffinity(0, {core})
    burn(ONCE_S / 8)
    os.sched_setaffinity(0, cores)
    for hog in hogs:
        hog.kill()
        hog.wait()


def come_late() -> None:
    """Ask for another worker."""
    subprocess.Popen([sys.executable, "-m", "paramserver", "scale", "workers=3"])


CAUSES: dict[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(ONCE_S),
    "burn": lambda: burn(ONCE_S),
    "little": lambda: time.sleep(ALWAYS_S),
    "collect": collect,
    "starve": starve,
    "": lambda: None,
}


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random samples. ``cause`` keeps the batch of this number, or each batch after it if it is negative."""

    def __init__(self, samples: int, cause: str, when: int) -> None:
        self.samples, self.cause, self.when, self.batches = samples, cause, when, 0

    def __len__(self) -> int:
        return self.samples

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        self.batches += 1
        if self.batches == self.when or self.batches > -self.when > 0:
            CAUSES[self.cause]()
        return [(torch.randn(FEATURES), torch.tensor(index % 10)) for index in indices]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, required=True)
    for place in ("data", "compute", "other"):
        parser.add_argument(f"--{place}", default="", choices=CAUSES, help="the cause that keeps the worker")
    parser.add_argument("--always", action="store_true", help="in each batch from then on")
    parser.add_argument("--processes", type=int, default=0, help="of the loader")
    parser.add_argument("--late", action="store_true", help="a worker joins, whose first batch takes long")
    args = parser.parse_args()
    torch.manual_seed(1)
    with ps.init() as ctx:
        slow = ctx.rank == SLOW
        when = -WHEN if args.always else WHEN
        model: nn.Module = nn.Sequential(nn.Linear(FEATURES, WIDE), nn.ReLU(), nn.Linear(WIDE, 10))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = Samples(args.slices * BATCH, args.data if slow else "", when)
        loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(data, batch_size=BATCH, num_workers=args.processes)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        batches = 0
        for _ in ctx.epochs(1):
            for x, y in loader:
                batches += 1
                strikes = slow and (batches == WHEN or (args.always and batches > WHEN))
                time.sleep(SLICE_S)
                if strikes:
                    CAUSES[args.compute]()
                if args.late and ctx.rank == 0 and batches == WHEN:
                    come_late()
                if args.late and ctx.rank == 2 and batches == 1:
                    time.sleep(ONCE_S)
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if strikes:
                    CAUSES[args.other]()


if __name__ == "__main__":
    main()
