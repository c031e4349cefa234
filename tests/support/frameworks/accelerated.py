"""A loop with accelerate: RESULT [FLAG]. Rank 1 makes the file FLAG and kills itself if the file is not there."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from paramserver.frameworks import huggingface


def main() -> None:
    result, *flag = sys.argv[1:]
    if os.environ.get("BACKEND") == "gloo":
        torch.distributed.init_process_group("gloo")
    else:
        huggingface.begin()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = torch.randn(64, 6)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data), batch_size=8 // accelerator.num_processes
    )
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    for epoch in range(3):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sub(x.sum(1, keepdim=True)).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if flag and epoch == 1 and accelerator.process_index == 1 and not Path(flag[0]).exists():
            Path(flag[0]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    losses = accelerator.gather_for_metrics(model(data).detach().mean().reshape(1))
    assert len(losses) == accelerator.num_processes
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), result)
    accelerator.end_training()


if __name__ == "__main__":
    main()
