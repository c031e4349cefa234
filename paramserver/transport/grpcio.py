"""gRPC, imported with its fork handlers off: the one place of ours that imports it. See `fork`.

Importing this module sets GRPC_ENABLE_FORK_SUPPORT in this process, since gRPC reads it once, when it is imported.
"""

from __future__ import annotations

from paramserver.transport import fork

fork.guard()

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

__all__ = ["grpc"]
