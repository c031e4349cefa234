"""The cost of being watched: a coordinator with 200 workers and a viewer, and training with and without a viewer.

The coordinator of the first case is simulated: for each request it makes the status of 200 workers, with other numbers
than for the previous request. Page, API and stream are the real ones, in a process of their own. The rows of the first
case are CPU seconds of this process for each second of the wall clock, and seconds until an answer is complete.
"""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import multiprocessing.connection
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.launch import RUN_S, SCRIPTS, flags, under_run
from benchmarks.rows import Row, rows
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2
from paramserver.web.access import Access
from paramserver.web.api import Api, make_app
from paramserver.web.feed import Feed
from paramserver.web.serving import Site

MEMBERS, ANSWERS = 200, 20
WATCHED_S = 20.0
MAX_SHARE, MAX_ANSWER_S = 0.02, 0.1
SCRIPT, WORKERS, STEPS, SKIP, SLICE_S = SCRIPTS / "straggle.py", 4, 120, 10, 0.02
OFF, ALONE, WATCHED = "no page", "without a viewer", "one viewer"


def run(repetitions: int) -> list[Row]:
    """Both cases. Raises RuntimeError if the page needs more than 2 % of a core, or an answer more than 100 ms."""
    return simulated(repetitions) + training(repetitions)


# ---- 200 workers


def simulated(repetitions: int) -> list[Row]:
    """CPU seconds per second with and without a viewer, and seconds per answer. Raises RuntimeError."""
    shares: dict[str, list[float]] = {WATCHED: [], ALONE: []}
    answers: dict[str, list[float]] = {"the status": [], "the page": []}
    for _ in range(repetitions):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        try:
            port = ours.recv()
            _get(port, "/")  # the web server is imported for the first visitor
            shares[ALONE].append(_share(ours))
            with _viewer(port):
                shares[WATCHED].append(_share(ours))
                for path, name in (("/api/v1/status", "the status"), ("/", "the page")):
                    answers[name].append(statistics.median(_get(port, path) for _ in range(ANSWERS)))
        finally:
            process.kill()
            process.join()
        said = {name: f"{values[-1] * 1000:.1f} ms" for name, values in answers.items()}
        print(
            f"{MEMBERS} workers: {shares[WATCHED][-1]:.2%} of a core with a viewer; {said}", file=sys.stderr, flush=True
        )
    if (worst := statistics.median(shares[WATCHED])) > MAX_SHARE:
        raise RuntimeError(f"the coordinator needs {worst:.1%} of a core for its page, and {MAX_SHARE:.0%} is the most")
    if (slowest := max(map(statistics.median, answers.values()))) > MAX_ANSWER_S:
        raise RuntimeError(f"an answer takes {slowest * 1000:.0f} ms, and {MAX_ANSWER_S * 1000:.0f} ms is the most")
    cpu = rows("watch", f"{MEMBERS} workers: CPU per second", shares, WATCHED)
    return cpu + rows("watch", f"{MEMBERS} workers: an answer", answers, "the status")


class Imagined:
    """A coordinator with many workers."""

    def __init__(self) -> None:
        self._looks = 0

    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        """Another status at each look."""
        self._looks += 1
        response = coordinator_pb2.StatusResponse(job="watched", state="training", term=1, samples_per_s=6000.0)
        response.processes.add(role="coordinator", name="coordinator", state="training", address="127.0.0.1:8790")
        for index in range(MEMBERS // 10):
            server = response.processes.add(role="server", name=f"server-{index}", state="training", address="a:8791")
            server.server.applied = self._looks
        for index in range(MEMBERS):
            worker = response.processes.add(role="worker", name=f"worker-{index}", state="training", address="a")
            worker.version, worker.clock, worker.samples_per_s = self._looks, self._looks, 30.0 + index % 7
            worker.waiting_for = f"version {self._looks + 1} of server-{index % 20}"
            worker.metrics["loss"] = 1.0 / self._looks
            worker.metrics["accuracy"] = 1.0 - 1.0 / self._looks
        if request.events:
            for number in range(100):
                response.events.add(at_s=float(number), kind="joined", subject="worker-1", text="worker-1 joined")
        return response


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    """In the child: serve, and answer each message with the CPU seconds so far."""

    async def main() -> None:
        coordinator, access = Imagined(), Access(Security.open())
        feed = Feed(coordinator.status)
        site = Site(lambda: make_app(Api(coordinator, feed, access, [], False), access))
        site.listen("127.0.0.1", 0)
        feed.start()
        pipe.send(site.port)
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time())

    asyncio.run(main())


def _share(pipe: multiprocessing.connection.Connection) -> float:
    """CPU seconds per second over some time."""
    began_cpu, began = _ask(pipe), time.monotonic()
    time.sleep(WATCHED_S)
    return (_ask(pipe) - began_cpu) / (time.monotonic() - began)


def _ask(pipe: multiprocessing.connection.Connection) -> float:
    pipe.send(None)
    return float(pipe.recv())


def _get(port: int, path: str) -> float:
    """Seconds until the answer is complete. Raises RuntimeError for any other answer than a good one."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} was answered with {answer.status}")
    return time.monotonic() - began


@contextmanager
def _viewer(port: int) -> Iterator[list[int]]:
    """Somebody reads the stream. Yields the bytes of each message so far. Raises RuntimeError if nothing came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    heard: list[int] = []
    closing = threading.Event()

    def read() -> None:
        deadline = time.monotonic() + RUN_S
        while not closing.is_set() and time.monotonic() < deadline:
            try:
                connection.request("GET", "/api/v1/stream")
                answer = connection.getresponse()
                while line := answer.readline():
                    heard.append(len(line))
            except (OSError, http.client.HTTPException, ValueError, AttributeError):
                connection.close()  # the coordinator is not there yet, or not any more
                time.sleep(0.1)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        closing.set()
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)
    if not heard:
        raise RuntimeError("the viewer has seen nothing")


# ---- training


def training(repetitions: int) -> list[Row]:
    """Seconds per step without a page, with a page without a viewer, and with a viewer. Raises RuntimeError."""
    seconds: dict[str, list[float]] = {WATCHED: [], ALONE: [], OFF: []}
    for number in range(repetitions):
        for name, times in seconds.items():
            times.append(_trained(name))
            said = f"{name}: {times[-1] * 1000:.2f} ms per step"
            print(f"repetition {number + 1} of {repetitions}, {said}", file=sys.stderr, flush=True)
    return rows("watch", f"a step of {WORKERS} workers", seconds, WATCHED)


def _trained(name: str) -> float:
    words = flags({"--steps": STEPS, "--skip": SKIP, "--slice-s": SLICE_S, "--slower": 1.0})
    slices = ["--slices-per-step", "16"]
    if name == OFF:
        return _step(words, [*slices, "--dashboard", "off"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    options = [*slices, "--dashboard", f"127.0.0.1:{port}"]
    if name == ALONE:
        return _step(words, options)
    with _viewer(port):
        return _step(words, options)


def _step(words: Sequence[str], options: Sequence[str]) -> float:
    seconds, _ = under_run(SCRIPT, words, WORKERS, options=options)
    return float(seconds)
