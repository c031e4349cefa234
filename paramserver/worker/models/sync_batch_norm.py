"""``nn.SyncBatchNorm`` over the slices of a step, on any device."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paramserver import errors
from paramserver.core.work.slices import DataSpec
from paramserver.worker.engine.summing import Summing


def layers_of(model: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    """The layers of a model that take statistics over all slices, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}


def check(layers: Mapping[str, nn.SyncBatchNorm], wanted: bool, several: bool, together: bool) -> None:
    """Raises ModelError if these layers cannot be trained so.

    ``wanted``: the setting is on. ``several``: the job has several models. ``together``: it is synchronous.
    """
    for name, layer in layers.items():
        where = f"SyncBatchNorm {name!r}" if name else "SyncBatchNorm"
        if not wanted:
            raise errors.ModelError(
                f"{where} takes statistics over all slices of a step, so workers wait for each other in each forward "
                "and backward pass: say that you want this with training.sync_batchnorm = true, or use BatchNorm, "
                "whose running statistics are averaged over the slices, or GroupNorm"
            )
        if several:
            raise errors.ModelError(
                f"{where} belongs to a job with several models (name=...), whose forward passes belong to several "
                "steps: use BatchNorm or GroupNorm"
            )
        if not together:
            raise errors.ModelError(
                f"{where} needs steps of several slices, and the job is asynchronous: set consistency.mode to sync, or "
                "use BatchNorm"
            )
        if layer.process_group is not None:
            raise errors.ModelError(
                f"{where} has a process group of its own, and here it takes statistics over all slices of a step: "
                "leave process_group out"
            )


def check_data(data: DataSpec, stream: bool) -> None:
    """Raises DataError if the slices of a step may have different numbers of batches."""
    if stream or data.drawn:
        raise errors.DataError(
            "SyncBatchNorm needs a batch of every slice of a step, and this loader may come to its end in the middle "
            "of a step: give it a data set with a length, without a batch sampler of its own, or use BatchNorm"
        )
    if not data.even:
        raise errors.DataError(
            "SyncBatchNorm needs the same number of batches of every slice of a step, and an epoch of "
            f"{data.batches_per_epoch} batches ends with slices of different length (accumulate): give an epoch a "
            f"multiple of {data.slices_per_step * data.batches} batches, or use BatchNorm"
        )


def use(layers: Mapping[str, nn.SyncBatchNorm], summing: Summing) -> None:
    """From now on these layers take their statistics over all slices of a step."""
    for number, (name, layer) in enumerate(layers.items()):
        # Bound to the layer, so that a copy of the model has layers of its own.
        layer.forward = types.MethodType(_forward(_Sums(summing, number, name)), layer)  # type: ignore[method-assign]


class _Sums:
    """The sums that one layer asks for."""

    def __init__(self, summing: Summing, number: int, name: str) -> None:
        self.summing, self._number = summing, number
        self.name = f"SyncBatchNorm {name!r}" if name else "SyncBatchNorm"

    def forward(self, given: Tensor) -> Tensor:
        """The sum of statistics over all slices."""
        return self.summing.total(f"the statistics of {self.name}", f"{self._number}", self._number, given)

    def backward(self, given: Tensor) -> Tensor:
        """The sum of gradients over all slices."""
        return self.summing.total(f"the gradients of {self.name}", f"-{self._number}", self._number, given)


class _Sum(torch.autograd.Function):
    """The sum over all slices. Each slice's loss counts by its samples, as in the step's gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, sums: _Sums) -> Tensor:
        ctx.of_layer = sums
        return sums.forward(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sums: _Sums = ctx.of_layer
        samples = sums.summing.samples
        return sums.backward(gradients[0] * samples) / samples, None


# That of all layers of this kind; SyncBatchNorm has another one, for torch's process groups.
_forward_of_one: Any = nn.BatchNorm1d.forward


def _forward(sums: _Sums) -> Any:
    def forward(self: nn.SyncBatchNorm, x: Tensor) -> Any:
        if not self.training:
            return _forward_of_one(self, x)
        slices = sums.summing.slices
        if not slices:
            raise errors.UserError(
                f"{sums.name} was called in training mode outside of the loop over the prepared loader, so its slice "
                "is not known: call model.eval() before, or take the batch from the prepared loader"
            )
        return _forward_of_one(self, x) if slices == 1 else _over_slices(self, x, sums)

    # Compiled code would not wait.
    return torch.compiler.disable(forward)  # type: ignore[no-untyped-call]


def _over_slices(layer: nn.SyncBatchNorm, x: Tensor, sums: _Sums) -> Tensor:
    layer._check_input_dim(x)
    layer._check_non_zero_input_channels(x)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    channels = x.size(1)
    var, mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
    # Few numbers: they are added up with twice the digits, in main memory.
    mean, var = mean.to("cpu", torch.float64), var.to("cpu", torch.float64)
    here = x.numel() / channels
    given = torch.cat([here * mean, here * (var + mean * mean), torch.full((1,), here, dtype=torch.float64)])
    total: Tensor = _Sum.apply(given, sums)  # type: ignore[no-untyped-call]
    count = float(total[-1].detach())
    mean, square = (total[:-1] / count).chunk(2)
    var = (square - mean * mean).clamp(min=0.0)
    _track(layer, count, mean.detach(), var.detach())
    shape = [1, channels, *[1] * (x.dim() - 2)]
    scale = torch.rsqrt(var + layer.eps).to(wide.device, wide.dtype)
    if layer.weight is not None:
        scale = scale * layer.weight
    out: Tensor = (wide - mean.to(wide.device, wide.dtype).view(shape)) * scale.view(shape)
    if layer.bias is not None:
        out = out + layer.bias.view(shape)
    return out.to(x.dtype)


def _track(layer: nn.SyncBatchNorm, count: float, mean: Tensor, var: Tensor) -> None:
    """Update the running statistics, as torch does."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    factor = layer.momentum
    with torch.no_grad():
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(layer.num_batches_tracked)
        unbiased = var * (count / (count - 1.0))
        for running, now in ((layer.running_mean, mean), (layer.running_var, unbiased)):
            running.lerp_(now.to(running.device, running.dtype), factor or 0.0)
