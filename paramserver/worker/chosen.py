"""The choices of the settings for a script: its device, how its numbers travel, its seed and threads."""

from __future__ import annotations

import torch

from paramserver import errors
from paramserver.compress.options import Wire
from paramserver.config import Settings
from paramserver.worker.data.seeding import seed_everything


def device_of(wish: str, rank: int) -> torch.device:
    """The device of the worker of this rank; "auto" is a GPU if there is one (several are shared out by rank)."""
    if wish != "auto":
        try:
            device = torch.device(wish)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise errors.ConfigError(f"training.device = {wish} cannot be used here: {error}") from error
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def wire_of(settings: Settings) -> Wire:
    """How weights and gradients travel."""
    training = settings.training
    return Wire(training.push_compression, training.topk_ratio, settings.flush_every)


def seed_and_threads(settings: Settings) -> None:
    """Make the process's random numbers and thread count those of the settings, before any model is built."""
    torch.set_num_threads(settings.training.threads_per_worker)
    # On GPUs, cuDNN may choose among algorithms of other bits, by measuring or by itself.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    seed_everything(settings.training.seed)
    torch.manual_seed(settings.training.seed)  # also for devices that will be used only later
