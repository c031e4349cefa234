"""A process group of torch.distributed whose collectives go to the servers of a job."""

from __future__ import annotations

import atexit
import datetime
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from paramserver import errors
from paramserver.distributed.collectives import Collective
from paramserver.distributed.rank import Rank
from paramserver.distributed.servers import Network, configured
from paramserver.distributed.work import Work

BACKEND = "paramserver"
# So many all-reduces of one element may come between a forward pass and its backward pass.
_COUNTS = 256
_networks: list[Network] = []
Tensors = Sequence[torch.Tensor]
# Its methods have several signatures each, of which torch's functions call one.
_Base: Any = dist.ProcessGroup


def create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroup:
    """The group of `init_process_group` or `new_group`; returns when all ranks have come."""
    if not _networks:
        _networks.append(configured())
    return ProcessGroup(Rank(_networks[0], store, rank, size, timeout.total_seconds()))


@atexit.register
def _close() -> None:
    while _networks:
        _networks.pop().close()


class ProcessGroup(_Base):  # type: ignore[misc]
    """See `torch.distributed`: the methods are those that its functions, and DDP, call.

    Every collective but a message is of all ranks, which must call their collectives in the same order.
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.rank, rank.size)
        self._rank = rank
        self._name = self._description = ""
        # With ``join`` DDP counts the ranks that have inputs: it drops the handle of this all-reduce of one element in
        # the forward pass, and its C++ part waits for it in the backward pass. Without the object in Python that part
        # would wait for ever.
        self._counts: deque[Work] = deque(maxlen=_COUNTS)

    def getBackendName(self) -> str:
        """The name of the backend."""
        return BACKEND

    # torch keeps both with its own backends, of which this group has none.

    def setGroupName(self, name: str) -> None:
        """Torch's name of the group, by which it finds the group again."""
        self._name = name

    def getGroupName(self) -> str:
        """See :meth:`setGroupName`."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """The name that the script gives the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """See :meth:`setGroupDesc`."""
        return self._description

    def _run(self, call: Collective, result: Sequence[torch.Tensor], opts: Any = None, last: bool = False) -> Work:
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        limit_s = seconds if seconds > 0 else None
        return Work(self._rank.exchange(call.make, list(result), call.finish, limit_s, last))

    def _call(self) -> Collective:
        return Collective(self._rank.rank)

    # ---- all ranks get the same

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Each tensor becomes the reduction of those of all ranks."""
        call, how = self._call(), opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        for tensor in tensors:
            call.reduction("all_reduce", tensor, tensor, how)
        work = self._run(call, tensors, opts)
        if sum(tensor.numel() for tensor in tensors) == 1:
            self._counts.append(work)
        return work

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Each tensor becomes that of the root."""
        call = self._call()
        for tensor in tensors:
            call.from_one("broadcast", tensor, opts.rootRank)
        return self._run(call, tensors, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """``outputs[0]`` become the tensors of all ranks."""
        call = self._call()
        for results, given in zip(outputs, inputs, strict=True):
            call.from_all("all_gather", given, results)
        return self._run(call, [one for results in outputs for one in results], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """The same for several tensors: ``outputs`` by rank."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """``output`` becomes the tensors of all ranks, one after the other."""
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """The same for several tensors."""
        call = self._call()
        for output, given in zip(outputs, inputs, strict=True):
            call.from_all("all_gather", given, _parts(output, self._rank.size))
        return self._run(call, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks, and for the collectives that they have begun before."""
        call = self._call()
        call.meets("barrier")
        return self._run(call, [], opts, last=True)

    # ---- one rank gets the result, or each rank a part

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """The root's tensor becomes the reduction of all."""
        call = self._call()
        for tensor in tensors:
            result = tensor if opts.rootRank == self._rank.rank else None
            call.reduction(f"reduce to rank {opts.rootRank}", tensor, result, opts.reduceOp)
        return self._run(call, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """``outputs[0]`` becomes the reduction of all ranks' tensors for this rank."""
        call, mine = self._call(), self._rank.rank
        for output, given in zip(outputs, inputs, strict=True):
            for rank, one in enumerate(given):
                result = output if rank == mine else None
                call.reduction("reduce_scatter", one, result, opts.reduceOp, f"reduce_scatter {rank}")
        return self._run(call, outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Work:
        """The same, where the tensors for all ranks lie one after the other."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        """The same for several tensors."""
        return self.reduce_scatter(outputs, [_parts(given, self._rank.size) for given in inputs], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """The root's ``outputs[0]`` become the tensors of all ranks."""
        call = self._call()
        root = opts.rootRank == self._rank.rank
        for number, given in enumerate(inputs):
            if not root:
                call.sends("gather", given, opts.rootRank)
                continue
            for rank, one in enumerate(outputs[number]):
                if rank == opts.rootRank:
                    call.moves(one, given)
                else:
                    call.receives("gather", one, rank)
        return self._run(call, outputs[0] if root else [], opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """``outputs[0]`` becomes the root's tensor for this rank."""
        call = self._call()
        for number, output in enumerate(outputs):
            if opts.rootRank != self._rank.rank:
                call.receives("scatter", output, opts.rootRank)
                continue
            for rank, given in enumerate(inputs[number]):
                if rank == opts.rootRank:
                    call.moves(output, given)
                else:
                    call.sends("scatter", given, rank)
        return self._run(call, outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """``outputs[r]`` becomes rank r's tensor for this rank."""
        call = self._call()
        for rank, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
            if rank == self._rank.rank:
                call.moves(output, given)
            else:
                call.sends("all_to_all", given, rank)
                call.receives("all_to_all", output, rank)
        return self._run(call, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """The same, where the tensors lie one after the other; ``sizes``: rows of each, none: all the same."""
        size = self._rank.size
        return self.alltoall(_parts(output, size, output_sizes), _parts(given, size, input_sizes), opts)

    alltoall_base = all_to_all_single

    # ---- messages

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        """Messages to one rank; over when it has come to receive them."""
        call = self._call()
        for tensor in tensors:
            call.sends(f"message {tag}", tensor, dst)
        return self._run(call, tensors)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        """Messages from one rank."""
        call = self._call()
        for tensor in tensors:
            call.receives(f"message {tag}", tensor, src)
        return self._run(call, tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Raises UserError: a message is asked for by its sender."""
        raise errors.UserError("the backend paramserver receives from a rank that is named only: recv(tensor, src=…)")

    def shutdown(self) -> None:
        """The script destroys the group."""
        self._rank.leave()

    def abort(self) -> None:
        """See :meth:`shutdown`."""
        self.shutdown()


def _parts(tensor: torch.Tensor, ranks: int, rows: Sequence[int] = ()) -> list[torch.Tensor]:
    """Views of the parts of each rank: ``rows`` of the first dimension each, or of the flat tensor equal parts."""
    if rows:
        stops = list(accumulate(rows))
        return [tensor[stop - count : stop] for stop, count in zip(stops, rows, strict=True)]
    if tensor.numel() % ranks:
        raise errors.UserError(f"a tensor of {tensor.numel()} elements cannot be cut into {ranks} equal parts")
    return list(tensor.view(-1).chunk(ranks)) if tensor.numel() else [tensor] * ranks
