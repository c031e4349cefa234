"""The store of the coordinator's state. No other process opens a store."""

from __future__ import annotations

from paramserver.store.base import ConflictError, Entry, Lead, Store, StoreFacts, TransientStoreError
from paramserver.store.opening import open_store

__all__ = ["ConflictError", "Entry", "Lead", "Store", "StoreFacts", "TransientStoreError", "open_store"]
