"""Open connections in a process that forks, as a DataLoader with workers makes it do.

A forked child has gRPC's state, but none of its threads. So in a child

- nothing of gRPC may be called: channels ask `check()` first;
- nothing of gRPC may be destroyed, since destructors take locks that a thread of the parent may have held: everything
  registered with `keep()` becomes immortal there, and garbage from before the fork is never collected. The event loop
  belongs to it: it shares its epoll object with the parent's, and closing it would deafen the parent;
- gRPC's own fork handlers must be off. They would stop and restart its threads around every fork, but skip that when
  another thread is inside gRPC, as ours always is, and then abort in the child, even if it never calls gRPC. gRPC reads
  the setting when it is imported, so it is imported by way of `paramserver.transport.grpcio` only.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import weakref

from paramserver.errors import ParamServerError

_SETTING = "GRPC_ENABLE_FORK_SUPPORT"

_log = logging.getLogger(__name__)
_kept: weakref.WeakSet[object] = weakref.WeakSet()
_guarded = False
_forked = False
_used = False


def guard() -> None:
    """Make forks safe from now on. To be called before gRPC is imported; later calls do nothing."""
    global _guarded
    if _guarded:
        return
    _guarded = True
    os.register_at_fork(after_in_child=_in_child)
    late = "grpc" in sys.modules and _SETTING not in os.environ
    setting = os.environ.setdefault(_SETTING, "0")
    if late or setting.lower() not in ("0", "false", "no"):
        _log.warning(
            "processes forked from this one (by a DataLoader with workers, say) may crash: "
            "set %s=0 in the environment, or import paramserver before grpc",
            _SETTING,
        )


def keep(thing: object) -> None:
    """Never destroy this in a forked child, nor what it refers to."""
    global _used
    _used = True
    _kept.add(thing)


def used() -> bool:
    """Whether this process has had connections. Those may be gone, but gRPC has its threads still."""
    return _used


def check() -> None:
    """Raises ParamServerError in a forked child."""
    if _forked:
        raise ParamServerError(
            "this process was forked from a worker, whose connections it cannot use: call paramserver only in the "
            "process that called init(), or start this process with the multiprocessing method 'spawn'"
        )


def begin_anew() -> None:
    """This process was forked, but from a process that had no connections: it may have its own.

    Raises AssertionError if there were connections.
    """
    global _forked
    assert not _kept, "a process with connections was forked"
    _forked = False
    if _guarded:
        os.environ.setdefault(_SETTING, "0")


def _in_child() -> None:
    global _forked
    _forked = True
    for thing in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    gc.freeze()
