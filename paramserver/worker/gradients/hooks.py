"""Functions of the script that change gradients on their way to the servers, as communication hooks of DDP do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paramserver import errors
from paramserver.compress.casts import Cast
from paramserver.compress.options import compressible
from paramserver.compress.registry import CASTS
from paramserver.core.layout.plan import Chunk
from paramserver.tensors.finite import is_finite
from paramserver.worker.flat import PartialSum
from paramserver.worker.gradients.outgoing import Encoded, Hook

PushHook = Callable[[Any, "PushBucket"], torch.Tensor | torch.futures.Future[torch.Tensor]]


class PushBucket:
    """One chunk of a contribution, on the CPU, as a hook of `Context.register_push_hook` gets it.

    Several small parameters may share a chunk, and a large parameter may have several chunks.

    >>> def halved(state, bucket):  # what a hook looks like
    ...     return bucket.buffer().div_(2)
    >>> halved(None, bucket) is bucket.buffer()
    True
    """

    def __init__(
        self, chunk: Chunk, buffer: torch.Tensor, samples: int, last: bool, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self._chunk, self._buffer, self._samples, self._last = chunk, buffer, samples, last
        self._parameters = parameters

    def index(self) -> int:
        """The number of the chunk, the same in every step and on every worker.

        >>> bucket.index()
        0
        """
        return self._chunk.index

    def buffer(self) -> torch.Tensor:
        """The numbers of the chunk, of shape (n,) and the parameters' type: the gradient times the number of samples.

        The hook may write to them.

        >>> bucket.buffer().dtype
        torch.float32
        """
        return self._buffer

    def samples(self) -> int:
        """The number of samples that the gradient is the sum of.

        >>> bucket.samples()
        8
        """
        return self._samples

    def gradients(self) -> list[torch.Tensor]:
        """The part of each parameter that lies here, as views of the buffer; a whole one in the parameter's shape.

        >>> [gradient.shape for gradient in bucket.gradients()]
        [torch.Size([1, 4]), torch.Size([1])]
        """
        views = []
        for piece, parameter in zip(self._chunk.pieces, self.parameters(), strict=True):
            view = self._buffer[piece.chunk_start : piece.chunk_start + piece.elements]
            views.append(view.view(parameter.shape) if piece.elements == parameter.numel() else view)
        return views

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of which something lies here, in the order of :meth:`gradients`.

        >>> [parameter is mine for parameter, mine in zip(bucket.parameters(), model.parameters())]
        [True, True]
        """
        return [self._parameters[piece.tensor] for piece in self._chunk.pieces]

    def is_last(self) -> bool:
        """True for the last chunk of the contribution.

        >>> bucket.is_last()
        True
        """
        return self._last


def of_script(state: Any, function: PushHook, parameters: Sequence[torch.nn.Parameter]) -> Hook:
    """A hook that calls a function of the script. It raises UserError and NonFiniteError, which name the function."""
    name = getattr(function, "__qualname__", repr(function))
    casts = {cast.dtype: cast for cast in CASTS.values()}

    def hook(partial: PartialSum, chunk: Chunk, values: torch.Tensor, last: bool) -> Encoded | None:
        try:
            found = function(state, PushBucket(chunk, values, partial.samples, last, parameters))
            if isinstance(found, torch.futures.Future):
                found = found.wait()
        except Exception as error:
            raise errors.UserError(
                f"the push hook {name} failed at bucket {chunk.index}: {type(error).__name__}: {error}"
            ) from error
        cast = _checked(name, found, chunk, values, casts)
        if not is_finite(found):
            raise errors.NonFiniteError(f"the push hook {name} returned NaN or an infinity for bucket {chunk.index}")
        if found.data_ptr() != values.data_ptr():
            values.copy_(found.reshape(-1))
        _clear_padding(chunk, values)
        return None if cast is None else Encoded(cast.encoding, cast.encode(values, values))

    return hook


def _checked(name: str, found: Any, chunk: Chunk, values: torch.Tensor, casts: dict[torch.dtype, Cast]) -> Cast | None:
    """The cast for numbers that a hook has returned; None: they are sent as they are. Raises UserError."""
    if not isinstance(found, torch.Tensor):
        raise errors.UserError(
            f"the push hook {name} returned {type(found).__name__} for bucket {chunk.index}: return a tensor, or a "
            "future of one"
        )
    if found.numel() != values.numel():
        raise errors.UserError(
            f"the push hook {name} returned {found.numel()} numbers for bucket {chunk.index} of {values.numel()}"
        )
    if found.dtype == values.dtype:
        return None
    if found.dtype not in casts or not compressible(chunk):
        raise errors.UserError(
            f"the push hook {name} returned {found.dtype} for bucket {chunk.index}: return {values.dtype}"
            + (", torch.bfloat16 or torch.float16" if compressible(chunk) else "")
        )
    return casts[found.dtype]


def _clear_padding(chunk: Chunk, values: torch.Tensor) -> None:
    """Set the elements between tensors to zero."""
    at = 0
    for piece in chunk.pieces:
        values[at : piece.chunk_start] = 0
        at = piece.chunk_start + piece.elements
    values[at:] = 0
