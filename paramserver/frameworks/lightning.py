"""Lightning: importing this module registers the strategy "paramserver".

>>> import paramserver.frameworks.lightning
>>> trainer = lightning.Trainer(strategy="paramserver", accelerator="cpu", devices=4)
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from paramserver.distributed import BACKEND
from paramserver.errors import ConfigError

NAME = "paramserver"


class ParamserverStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's strategy for DDP, whose collectives go to the servers. Takes the same arguments."""

    strategy_name = NAME

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"process_group_backend": BACKEND, **arguments})

    def setup_environment(self) -> None:
        """Begin the process group. Raises ConfigError if the Trainer has another number of processes than the job."""
        ranks = os.environ.get("WORLD_SIZE", "")
        wanted = self.num_nodes * self.num_processes
        if not ranks:
            raise ConfigError(
                'the strategy "paramserver" needs servers: start the script by paramserver run --ddp SCRIPT '
                f"--workers {wanted}"
            )
        if int(ranks) != wanted:
            raise ConfigError(
                f"the Trainer has {wanted} processes (num_nodes × devices), and the job has {ranks} ranks: say "
                f"Trainer(devices={ranks}), or --workers {wanted}"
            )
        super().setup_environment()


if NAME not in StrategyRegistry.available_strategies():
    StrategyRegistry.register(NAME, ParamserverStrategy, description="DDP, with collectives on the servers")
