"""paramserver: the parameter server for PyTorch.

>>> import paramserver as ps
>>> ctx = ps.init()
>>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)

Importing this package starts nothing and loads neither torch nor gRPC; they come with the first use of a name below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paramserver import errors

if TYPE_CHECKING:
    from paramserver.api import Client, init, server_optimizer
    from paramserver.notebook import launch
    from paramserver.worker.context import Context

__version__ = "0.1.0"
__all__ = ["Client", "Context", "__version__", "errors", "init", "launch", "server_optimizer"]


def __getattr__(name: str) -> Any:
    if name == "init":
        from paramserver.api import init

        return init
    if name == "Client":
        from paramserver.api import Client

        return Client
    if name == "Context":
        from paramserver.worker.context import Context

        return Context
    if name == "launch":
        from paramserver.notebook import launch

        return launch
    if name == "server_optimizer":
        from paramserver.api import server_optimizer

        return server_optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
