"""Writes down what a script sees of its process, one file for each worker, and trains nothing. argv: DIRECTORY ..."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import json
import locale
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings
from multiprocessing import process
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

import paramserver as ps

MAIN = sys.modules["__main__"]
_PR_GET_PDEATHSIG = 2
# In /proc/self/status: blocked, ignored and caught signals, and others that children inherit.
INHERITED = ("Umask", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp", "Cpus_allowed_list", "CapEff")


def stream(file: TextIO) -> dict[str, object]:
    return {
        "name": str(file.name),
        "encoding": file.encoding,
        "errors": file.errors,
        "line_buffering": file.line_buffering,
        "write_through": getattr(file, "write_through", None),
        "tty": file.isatty(),
        "original": file in (sys.__stdin__, sys.__stdout__, sys.__stderr__),
    }


def environment() -> dict[str, str]:
    """The variables; one of them also as C libraries see it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return {**os.environ, "getenv": str(getenv(b"PARAMSERVER_INTERNAL_INDEX"))}


def dies_with() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value


def seen() -> dict[str, object]:
    """What is the same in all workers, and in each run."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "command line": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "main": sorted(vars(MAIN)),
        "file": __file__,
        "name": __name__,
        "spec": str(__spec__),
        "package": str(__package__),
        "main is this script": vars(MAIN) is globals(),
        "path": sys.path,
        "flags": str(sys.flags),
        "warnings": [str(row) for row in warnings.filters],
        "recursion": sys.getrecursionlimit(),
        "directory": os.getcwd(),
        "environment": environment(),
        "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
        "descriptors": sorted(name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
        "handlers": {str(number): str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
        "status": {name: status[name] for name in INHERITED},
        "threads": [threading.active_count(), status["Threads"]],
        "main thread": threading.current_thread() is threading.main_thread(),
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "dies with its parent": dies_with(),
        "limits": [str(resource.getrlimit(number)) for number in range(16)],
        "garbage": [gc.isenabled(), gc.get_threshold()],
        "faulthandler": faulthandler.is_enabled(),
        "locale": locale.setlocale(locale.LC_ALL),
        "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "method": str(multiprocessing.get_start_method(allow_none=True)),
    }


def drawn() -> dict[str, object]:
    """What differs between workers, and between runs."""
    return {
        "python": random.random(),
        "numpy": float(np.random.rand()),
        "torch": float(torch.rand(1)),
        "key": hashlib.sha256(bytes(process.current_process().authkey)).hexdigest(),
    }


if __name__ == "__main__":
    facts = {"seen": seen(), "drawn": drawn(), "pid": os.getpid(), "parent": os.getppid()}
    ctx = ps.init()
    Path(sys.argv[1], f"{ctx.rank}.json").write_text(json.dumps(facts))
    print("to stdout")
    print("to stderr", file=sys.stderr)
    ctx.close()
