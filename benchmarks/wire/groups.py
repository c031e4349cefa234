"""gloo and PyTorch RPC between the two processes: rank 0 is the parent, rank 1 the peer."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc


def join(directory: str, rank: int) -> None:
    """Meet the other process. RPC is set to TCP, as between machines; by itself it finds a way through memory."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=2)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{directory}/rpc", _transports=["uv"], _channels=["mpt_uv", "basic"]
    )
    warnings.filterwarnings("ignore", "You are using a Backend")  # said by torch to itself
    init: Any = rpc.init_rpc
    init(("parent", "peer")[rank], rank=rank, world_size=2, rpc_backend_options=options)


def gloo(order: str, size: int, count: int, other: int) -> None:
    """One side of ``count`` exchanges with rank ``other``. A byte follows a push and precedes a pull."""
    there, back = payload(size, "there"), payload(size, "back")
    little = torch.zeros(1, dtype=torch.uint8)
    parent = other == 1
    for _ in range(count):
        if order == "push":
            dist.send(there, other) if parent else dist.recv(there, other)
            dist.recv(little, other) if parent else dist.send(little, other)
        elif order == "pull":
            dist.send(little, other) if parent else dist.recv(little, other)
            dist.recv(back, other) if parent else dist.send(back, other)
        else:
            works = [dist.isend(there, other), dist.irecv(back, other)]
            for work in works:
                assert work is not None
                work.wait()


def take(tensor: torch.Tensor) -> int:
    """The called side of RPC: the number of bytes received."""
    return tensor.nbytes


def give(size: int) -> torch.Tensor:
    """The called side of RPC: so many bytes."""
    return payload(size)


@cache
def payload(size: int, use: str = "") -> torch.Tensor:
    """So many bytes, float32; the same ones for each ``use``."""
    return torch.zeros(size // 4)
