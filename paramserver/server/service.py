"""The RPCs of one server. Messages come in and are checked; the shard of the present timeline decides."""

from __future__ import annotations

from paramserver.server.rpc.control import Control
from paramserver.server.rpc.exchange import Exchanges
from paramserver.server.rpc.facts import Facts
from paramserver.server.rpc.setup import Setup


class ShardService(Setup, Control, Exchanges, Facts):
    """One server behind its RPCs. Lives in one event loop; :meth:`close` ends its threads."""
