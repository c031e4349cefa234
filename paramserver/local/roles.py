"""What the launcher's children run: ``python -m paramserver.local.roles coordinator | server | worker SCRIPT ...``.

Their settings come in the environment, put there by the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from paramserver import errors
from paramserver.config import Settings, load_settings
from paramserver.local.children import die_with_parent
from paramserver.local.logs import configure

if TYPE_CHECKING:
    from paramserver.server.node import ServerNode

ENV_STORE = "PARAMSERVER_INTERNAL_STORE"
ENV_STORE_NAME = "PARAMSERVER_INTERNAL_STORE_NAME"
ENV_READY_FD = "PARAMSERVER_INTERNAL_READY_FD"
# The launcher's wish for the index of a server, or the rank of a worker.
ENV_INDEX = "PARAMSERVER_INTERNAL_INDEX"


def main() -> None:
    """Run the role that the first argument names."""
    die_with_parent()
    role, *rest = sys.argv[1:]
    settings = load_settings()
    configure(settings.log.level)
    if role == "worker":
        run_worker(rest)
        return
    try:
        asyncio.run(run_coordinator(settings) if role == "coordinator" else run_server(settings))
    except errors.ParamServerError as error:
        print(f"paramserver: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _stopped() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def run_coordinator(settings: Settings) -> None:
    """Serve until told to stop; says its address on the descriptor of ENV_READY_FD."""
    from paramserver.coordinator.journal import Journal
    from paramserver.coordinator.service import CoordinatorService, JobOptions
    from paramserver.local.alone import consistency_of
    from paramserver.store import open_store
    from paramserver.transport import grpc

    stop = _stopped()
    job = settings.cluster.job
    store = open_store(os.environ.pop(ENV_STORE), f"paramserver:{job}:")
    journal = await Journal.open(store, os.environ.get(ENV_STORE_NAME, ""))
    options = JobOptions(
        job=job,
        servers=settings.cluster.servers,
        workers=settings.cluster.workers,
        consistency=consistency_of(settings.consistency.mode, settings.consistency.staleness),
        slices_per_step=settings.training.slices_per_step,
        seed=settings.training.seed,
        lease_s=settings.cluster.lease_s,
        call_timeout_s=settings.cluster.join_timeout_s,
    )
    service = CoordinatorService(options, grpc.connect, journal)
    host, _, port = (settings.cluster.coordinator or "127.0.0.1:0").rpartition(":")
    server = await grpc.serve([("Coordinator", service)], host.strip("[]"), int(port))
    service.address = server.address
    await service.start()
    _say_ready(server.address)
    await stop.wait()
    await server.stop(0.2)
    await service.close()


async def run_server(settings: Settings) -> None:
    """Hold a shard until told to stop, or until the shard fails (exit code 1)."""
    import torch

    from paramserver.server.node import ServerNode
    from paramserver.server.service import ShardService
    from paramserver.transport import grpc

    stop = _stopped()
    torch.set_num_threads(settings.training.threads_per_server)
    # The first optimizer of a process loads a good part of torch: not during the first step.
    torch.optim.SGD([torch.zeros(1)], lr=0.0)
    service = ShardService(settings.cluster.job, grpc.connect, settings.cluster.wait_timeout_s)
    server = await grpc.serve([("Shard", service)])
    index = int(os.environ.get(ENV_INDEX, "0"))
    node = ServerNode.create(
        service, grpc.connect(settings.cluster.coordinator), server.address, index, settings.cluster.join_timeout_s
    )
    await node.join()
    failed = asyncio.create_task(_failure(node))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({failed, stopping}, return_when=asyncio.FIRST_COMPLETED)
    reason = failed.result() if failed.done() else ""
    failed.cancel()
    await node.close()
    await server.stop(0.2)
    if reason:
        raise errors.JobFailedError(reason)


async def _failure(node: ServerNode) -> str:
    """Wait until the shard or its session has failed; returns the reason."""
    while not (failure := node.service.failure or node.session.failure):
        await asyncio.sleep(0.1)
    return str(failure)


def _say_ready(address: str) -> None:
    if fd := os.environ.get(ENV_READY_FD):
        with open(int(fd), "w") as pipe:
            pipe.write(address + "\n")


def run_worker(argv: list[str]) -> None:
    """Run a training script as ``python SCRIPT ARG ...`` would, with errors told as its user expects them."""
    script, *rest = argv
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leave:
        code = _exit_code(leave)
    except errors.ParamServerError as error:
        print(f"paramserver: error: {error}{_where(error.__traceback__, script)}", file=sys.stderr, flush=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # the top of the process: shown in full, from the script on
        traceback.print_exception(type(error), error, _from_script(error.__traceback__, script))
        code = 1
    if code:
        # Nothing more is handed in: the launcher ends the job.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(leave: SystemExit) -> int:
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    print(leave.code, file=sys.stderr)
    return 1


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback without the frames that led to the script; None if the script did not even begin."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def _where(trace: TracebackType | None, script: str) -> str:
    """The last line of the script that was at work, in words."""
    lines = [step.lineno for step in traceback.extract_tb(trace) if step.filename == script]
    return f" ({script}, line {lines[-1]})" if lines else ""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
