"""Notices writes of the script to trained parameters, whose weights the servers hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from paramserver import errors
from paramserver.tensors.dtypes import buffer_of

# With each version so many bytes, in so many pieces, are compared for writes that leave no trace.
_SAMPLE_BYTES, _SAMPLE_PIECES = 256 << 10, 16


class Writes:
    """Tells which parameters may have been written to since their weights came. The caller then compares them.

    Operations of torch on a parameter leave a trace, and so does other memory that is put in its place. What goes
    through ``parameter.data`` leaves none: in the loop a part of the weights is compared with each version, outside of
    it (see :meth:`outside`) all of them.
    """

    def __init__(self, parameters: Mapping[int, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._kinds = {index: (p.dtype, p.device, p.shape) for index, p in self._parameters.items()}
        self._counts: list[int] = []
        self._places: list[int] = []
        self._sums: dict[int, int] | None = None
        self._sample: list[tuple[int, int, Tensor]] = []
        self._turn = self._pieces()

    def came(self, whole: bool) -> None:
        """Weights have come, and are right. ``whole``: all weights are there."""
        self._counts = [p._version for p in self._parameters.values()]
        self._places = [p.data_ptr() for p in self._parameters.values()]
        self._sums = None
        self._sample = []
        left = _SAMPLE_BYTES
        while whole and left > 0 and len(self._sample) < _SAMPLE_PIECES:
            index, start, stop = next(self._turn)
            piece = _flat(self._parameters[index])[start:stop].clone()
            if piece.device.type != "cpu" or (self._sample and (index, start) == self._sample[0][:2]):
                break
            self._sample.append((index, start, piece))
            left -= piece.nbytes

    def outside(self) -> None:
        """The script leaves the loop, and may do anything until it comes back."""
        if self._sums is None:  # else the script has left the loop before, and its writes since then must be found
            self._sums = {index: _sum(p) for index, p in self._parameters.items()}

    def suspects(self) -> list[int]:
        """The parameters that may have been written to, by their index; none before the first weights have come."""
        if not self._counts:
            return []
        found = set()
        for (index, p), count, place in zip(self._parameters.items(), self._counts, self._places, strict=True):
            if p._version != count or p.data_ptr() != place:
                found.add(index)
        for index, start, piece in self._sample:
            here = _flat(self._parameters[index])[start : start + piece.numel()]
            if index not in found and not equal_bits(here, piece):
                found.add(index)
        if self._sums is not None:
            found.update(index for index, total in self._sums.items() if _sum(self._parameters[index]) != total)
        return sorted(found)

    def check_kinds(self, suspects: Iterable[int]) -> None:
        """Raises ModelError if one of these parameters has another type, device or shape than it had."""
        for index in suspects:
            parameter = self._parameters[index]
            was, now = self._kinds[index], (parameter.dtype, parameter.device, parameter.shape)
            if was != now:
                raise errors.ModelError(
                    f"a parameter of {_kind(*was)} is {_kind(*now)} now: convert and move the model before ctx.prepare"
                )

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """All weights in pieces, again and again without end."""
        while True:
            for index, parameter in self._parameters.items():
                step = max(1, _SAMPLE_BYTES // 4 // parameter.element_size())
                for start in range(0, max(1, parameter.numel()), step):
                    yield index, start, min(start + step, parameter.numel())


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type are equal; NaN equals itself."""
    if one.device.type == "cpu" and torch.equal(one, other):
        return True
    ours, theirs = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(ours, theirs)


def _flat(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)


def _sum(parameter: Tensor) -> int:
    return zlib.crc32(buffer_of(_flat(parameter).cpu().contiguous()))


def _kind(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} and shape {tuple(shape)} on {device}"
