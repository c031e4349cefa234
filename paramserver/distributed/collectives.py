"""Collectives as exchanges with servers: who brings which bytes, and where those of others belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paramserver import errors
from paramserver.distributed.rounds import Exchange, Numbers
from paramserver.tensors.dtypes import dtype_name
from paramserver.v1 import shard_pb2

_REDUCTIONS = {
    dist.ReduceOp.SUM: shard_pb2.REDUCTION_SUM,
    dist.ReduceOp.AVG: shard_pb2.REDUCTION_AVG,
    dist.ReduceOp.MIN: shard_pb2.REDUCTION_MIN,
    dist.ReduceOp.MAX: shard_pb2.REDUCTION_MAX,
    dist.ReduceOp.PRODUCT: shard_pb2.REDUCTION_PRODUCT,
    dist.ReduceOp.BAND: shard_pb2.REDUCTION_BAND,
    dist.ReduceOp.BOR: shard_pb2.REDUCTION_BOR,
    dist.ReduceOp.BXOR: shard_pb2.REDUCTION_BXOR,
}


class Collective:
    """The exchanges of one call. Tensors that are not dense in main memory are copied there and back."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._makes: list[Callable[[Numbers], Exchange]] = []
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make(self, numbers: Numbers) -> list[Exchange]:
        """All exchanges, with their numbers."""
        return [one(numbers) for one in self._makes]

    def finish(self) -> None:
        """Copy results to where they belong."""
        for tensor, host in self._back:
            tensor.detach().copy_(host)
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)

    def reduction(
        self,
        name: str,
        given: torch.Tensor,
        result: torch.Tensor | None,
        how: Any,
        channel: str = "",
    ) -> None:
        """The contributions of all ranks, reduced. ``result``: where to; None: this rank does not want the result."""
        op, number = _reduction(how)
        give = self._reads(given)
        into = {0: self._writes(result)} if result is not None else {}
        what = f"{name} ({op}) of {given.numel()} {dtype_name(given.dtype)}"
        self._add(what, channel, give.nbytes, reduction=number, dtype=dtype_name(given.dtype), give=give, into=into)

    def from_all(self, name: str, given: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Each rank's tensor to all ranks; ``results``: where they belong, by rank."""
        give, into = self._reads(given), {rank: self._writes(one) for rank, one in enumerate(results)}
        if any(view.nbytes != give.nbytes for view in into.values()):
            raise errors.UserError(f"{name}: all tensors must have as many bytes as this rank's, {give.nbytes}")
        self._add(f"{name} of {_described(given)}", "", give.nbytes, give=give, into=into)

    def from_one(self, name: str, tensor: torch.Tensor, root: int) -> None:
        """The tensor of ``root`` to all ranks."""
        what = f"{name} from rank {root} of {_described(tensor)}"
        if root == self._rank:
            give = self._reads(tensor)
            self._add(what, "", give.nbytes, give=give)
        else:
            view = self._writes(tensor)
            self._add(what, "", view.nbytes, into={root: view})

    def sends(self, name: str, tensor: torch.Tensor, to: int) -> None:
        """A message to one rank."""
        give = self._reads(tensor)
        self._message(name, self._rank, to, tensor, give.nbytes, give=give)

    def receives(self, name: str, tensor: torch.Tensor, source: int) -> None:
        """A message from one rank."""
        view = self._writes(tensor)
        self._message(name, source, self._rank, tensor, view.nbytes, into={source: view})

    def moves(self, tensor: torch.Tensor, given: torch.Tensor) -> None:
        """This rank is the receiver of its own tensor: the tensor is copied, and nothing is sent."""
        self._back.append((tensor, given.detach().clone()))

    def meets(self, name: str) -> None:
        """All ranks come, and nobody brings anything."""
        self._add(name, "", 0)

    def _message(
        self,
        name: str,
        source: int,
        to: int,
        tensor: torch.Tensor,
        nbytes: int,
        give: memoryview | None = None,
        into: dict[int, memoryview] | None = None,
    ) -> None:
        what = f"{name} of {_described(tensor)} from rank {source} to rank {to}"
        ranks = (min(source, to), max(source, to))
        self._add(what, f"{name} {source}>{to}", nbytes, ranks=ranks, give=give, into=into or {})

    def _add(
        self,
        what: str,
        channel: str,
        nbytes: int,
        ranks: tuple[int, ...] = (),
        reduction: int = 0,
        dtype: str = "",
        give: memoryview | None = None,
        into: dict[int, memoryview] | None = None,
    ) -> None:
        def make(numbers: Numbers) -> Exchange:
            number, places = numbers.take(channel), into or {}
            return Exchange(what, channel, number, nbytes, ranks, reduction, dtype, give, places, bool(places))

        self._makes.append(make)

    def _staged(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu" or not tensor.is_contiguous()

    def _reads(self, tensor: torch.Tensor) -> memoryview:
        _check(tensor)
        return _bytes(tensor.detach().cpu().contiguous())

    def _writes(self, tensor: torch.Tensor) -> memoryview:
        _check(tensor)
        if not self._staged(tensor):
            return _bytes(tensor.detach())
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._back.append((tensor, host))
        return _bytes(host)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _bytes(host: torch.Tensor) -> memoryview:
    return memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _check(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise errors.UserError("the backend paramserver moves dense tensors only: make this one dense (to_dense())")


def _reduction(how: Any) -> tuple[str, int]:
    for op, number in _REDUCTIONS.items():
        if how == op:
            return shard_pb2.Reduction.Name(number).removeprefix("REDUCTION_").lower(), number
    raise errors.UserError("the backend paramserver reduces by sum, avg, min, max, product, band, bor and bxor only")
