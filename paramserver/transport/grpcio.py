"""gRPC, imported with its fork handlers off and without its notes: the one place of ours that imports it. See `fork`.

Importing this module sets GRPC_ENABLE_FORK_SUPPORT in this process, since gRPC reads it once, when it is imported. The
same holds for GRPC_VERBOSITY, unless the user has set it: gRPC writes a line to standard error for each handshake that
fails, on both sides, and our own sentence about it would be lost between these lines.
"""

from __future__ import annotations

import os

from paramserver.transport import fork

fork.guard()
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

__all__ = ["grpc"]
