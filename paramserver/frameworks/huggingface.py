"""accelerate, and the Trainer of transformers: begin the process group, and find what a restart goes on from.

>>> from paramserver.frameworks import huggingface
>>> huggingface.begin()
>>> trainer = transformers.Trainer(model, arguments, train_dataset=data)
>>> trainer.train(resume_from_checkpoint=huggingface.last_checkpoint(arguments.output_dir))
"""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

import torch.distributed as dist

from paramserver.distributed import BACKEND

# The Trainer writes this file last of those that one process writes.
_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def begin(timeout_s: float = 1800.0) -> bool:
    """Begin the process group of the ranks, which accelerate and the Trainer then take as it is.

    Call it before `accelerate.Accelerator` or `transformers.TrainingArguments` is made. On a machine without a GPU,
    these get ``cpu=True`` and ``use_cpu=True``. Returns whether there is a group: False in a script that nobody has
    started with ranks (``RANK`` is not set). ``timeout_s``: seconds that a collective waits for all ranks. Raises
    ConfigError if no coordinator is configured.

    >>> huggingface.begin()
    False
    """
    if "RANK" not in os.environ:
        return False
    if not dist.is_initialized():
        dist.init_process_group(BACKEND, timeout=datetime.timedelta(seconds=timeout_s))
    return True


def last_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of the Trainer in its ``output_dir`` that is complete; None if there is none.

    A rank that is killed while it saves leaves a part of a checkpoint, from which the Trainer cannot go on. All ranks
    get the same answer if all call this function before training begins.

    >>> huggingface.last_checkpoint("/nothing/there") is None
    True
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    states = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    found = {
        int(match[1]): path
        for path in Path(directory).glob("checkpoint-*")
        if (match := _NAME.fullmatch(path.name)) and all((path / name).is_file() for name in (_STATE, *states))
    }
    return str(found[max(found)]) if found else None
