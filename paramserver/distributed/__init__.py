"""The backend "paramserver" of torch.distributed: process groups whose reductions are done by servers.

>>> import paramserver.distributed
>>> torch.distributed.init_process_group("paramserver")

Importing this package makes the backend known to torch; `paramserver run --ddp` imports it for the script.
"""

from __future__ import annotations

import torch.distributed as dist

from paramserver.distributed.group import BACKEND, ProcessGroup, create

__all__ = ["BACKEND", "ProcessGroup"]

if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])
