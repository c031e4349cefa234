"""The Trainer of transformers with a model made from a configuration: RESULT OUTPUT [FLAG].

Rank 1 makes the file FLAG and kills itself at step 5 if the file is not there; a checkpoint is saved every 3 steps.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from paramserver.frameworks import huggingface


class Killing(TrainerCallback):  # type: ignore[misc]
    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 5 and os.environ.get("RANK") == "1" and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    result, output, *flag = sys.argv[1:]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("BACKEND") == "gloo":
        torch.distributed.init_process_group("gloo")
    else:
        huggingface.begin()
    arguments = TrainingArguments(
        output,
        use_cpu=True,
        per_device_train_batch_size=8 // ranks,
        max_steps=8,
        save_steps=3,
        logging_steps=4,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    set_seed(3)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    tokens = torch.randint(0, 32, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    callbacks = [Killing(Path(flag[0]))] if flag else []
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=callbacks)
    found = huggingface.last_checkpoint(output)
    print(f"goes on from {Path(found).name if found else 'nothing'}", flush=True)
    trainer.train(resume_from_checkpoint=found)
    if trainer.is_world_process_zero():
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), result)


if __name__ == "__main__":
    main()
