"""Workers that make unequal numbers of steps without a loader, and just end: `uneven.py STEPS_OF_0 STEPS_OF_1 [kill]`.

With "kill", worker 1 waits until worker 0 has left, makes one more step and is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import paramserver as ps


def main() -> None:
    ctx = ps.init()
    model = torch.nn.Linear(8, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(int(sys.argv[1 + ctx.rank])):
        step()
    if ctx.rank == 1 and "kill" in sys.argv:
        deadline = time.monotonic() + 60.0
        while ctx.world_size > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        step()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
