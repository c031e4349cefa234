"""Lightning with the strategy of its own: RESULT DIRECTORY [FLAG].

Rank 1 makes the file FLAG and kills itself in the third epoch if the file is not there; each epoch is saved.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import paramserver.frameworks.lightning  # noqa: F401  # registers the strategy


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, flag: Path | None) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        self.flag = flag

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x = batch[0]
        loss: torch.Tensor = self.body(x).sub(x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)  # averages whole numbers, too
        due = self.current_epoch == 2 and number == 1 and self.global_rank == 1
        if self.flag is not None and due and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    result, directory, *flag = sys.argv[1:]
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6))
    model = Net(Path(flag[0]) if flag else None)
    trainer = lightning.Trainer(
        strategy="ddp" if os.environ.get("BACKEND") == "gloo" else "paramserver",
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(directory, save_last=True, every_n_epochs=1)],
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    last = Path(directory, "last.ckpt")
    print(f"goes on from {'last.ckpt' if last.exists() else 'nothing'}", flush=True)
    trainer.fit(model, loader, ckpt_path="last" if last.exists() else None)
    if trainer.is_global_zero:
        torch.save({**model.state_dict(), "loss_epoch": trainer.callback_metrics["loss_epoch"]}, result)


if __name__ == "__main__":
    main()
