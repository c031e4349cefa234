"""Tickets: proofs, for a while, that somebody has had a token. They need no memory, so another coordinator takes them.

A session's ticket is the value of its cookie. A link's ticket stands behind the "#" of the address that `paramserver
dashboard` and `paramserver run` print, which a browser sends to nobody; it opens the page once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import struct
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paramserver.transport.security.tokens import Tokens

SESSION_S = 8 * 3600.0
LINK_S = 8 * 3600.0

Kind = Literal["link", "session"]
# 27 bytes with the time: as text they have no padding.
_NONCE_BYTES, _PROOF_BYTES = 8, 15
_HEAD = struct.Struct(f"!I{_NONCE_BYTES}s")


def ticket(kind: Kind, token: str, until_s: float) -> str:
    """A ticket for the owner of ``token``, good until this time of the wall clock."""
    head = _HEAD.pack(int(until_s), secrets.token_bytes(_NONCE_BYTES))
    return base64.urlsafe_b64encode(head + _proof(kind, token, head)).decode()


def token_of(shown: str, kind: Kind, tokens: Iterable[str], now_s: float) -> str:
    """The token with which a ticket was made; empty if it was made with none of these, or its time is over."""
    try:
        raw = base64.urlsafe_b64decode(shown)
        head, proof = raw[: _HEAD.size], raw[_HEAD.size :]
        until_s, _ = _HEAD.unpack(head)
    except (ValueError, struct.error):
        return ""
    if now_s >= until_s or base64.urlsafe_b64encode(raw).decode() != shown:  # one ticket has one text
        return ""
    return next((token for token in tokens if hmac.compare_digest(proof, _proof(kind, token, head))), "")


def page_link(url: str, tokens: Tokens) -> str:
    """The address of the page at ``url``, with which a browser may read it if that takes a token."""
    token = tokens.first()
    return f"{url}/#key={ticket('link', token, time.time() + LINK_S)}" if token else url


def _proof(kind: Kind, token: str, head: bytes) -> bytes:
    return hmac.digest(token.encode(), f"paramserver page {kind}\0".encode() + head, hashlib.sha256)[:_PROOF_BYTES]
