"""All compressors, by the name that settings use and by the number that messages carry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from paramserver.compress.base import Compressor
from paramserver.compress.casts import BF16, FP16, Cast
from paramserver.compress.int8 import Int8
from paramserver.compress.options import PULL_PRECISIONS, PUSH_COMPRESSIONS
from paramserver.compress.topk import TopK
from paramserver.errors import ProtocolError
from paramserver.v1 import shard_pb2

CASTS: Mapping[str, Cast] = MappingProxyType({"bf16": BF16, "fp16": FP16})
# How payloads are read does not depend on options.
_READERS: Mapping[int, Compressor] = MappingProxyType({int(one.encoding): one for one in (BF16, FP16, Int8(), TopK())})


def push_compressor(name: str, topk_ratio: float = 0.01) -> Compressor | None:
    """The compressor that ``training.push_compression`` names; None for "none"."""
    assert name in PUSH_COMPRESSIONS, name
    if name == "none":
        return None
    if name in CASTS:
        return CASTS[name]
    return TopK(topk_ratio) if name == "topk" else Int8()


def pull_cast(name: str) -> Cast | None:
    """The cast that ``training.pull_precision`` names; None for "fp32"."""
    assert name in PULL_PRECISIONS, name
    return CASTS.get(name)


def reader(encoding: int, allowed: frozenset[int]) -> Compressor | None:
    """The compressor that decodes this encoding; None: the bytes are the numbers themselves.

    Raises ProtocolError for an encoding that is unknown, or not among those ``allowed`` here.
    """
    if encoding == shard_pb2.ENCODING_EXACT:
        return None
    found = _READERS.get(encoding)
    if found is None:
        raise ProtocolError(f"encoding number {encoding} is unknown; this version knows 0 and {sorted(_READERS)}")
    if encoding not in allowed:
        raise ProtocolError(f"the encoding {found.name} has no place in this message")
    return found


NONE: frozenset[int] = frozenset()
FOR_PUSH: frozenset[int] = frozenset(_READERS)
FOR_PULL: frozenset[int] = frozenset(int(one.encoding) for one in CASTS.values())
