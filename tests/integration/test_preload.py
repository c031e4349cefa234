"""Processes that are forked of a preloaded process: scripts see no difference, and whoever dies, the others go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paramserver.processes.alive import is_alive
from tests.support.integration.harness import ROOT, SCRIPTS, Place, place_fixture, status_of, until
from tests.support.integration.paced import training
from tests.support.integration.preloaded import Nursery

# Facts of a run that are its own.
OWN = (
    *("CHECKPOINT__DIR", "SECURITY__TOKEN_FILE"),
    *("__COORDINATOR", "CLUSTER__JOB", "CLUSTER__PRELOAD", "CLUSTER__WORKERS", "WEB__DASHBOARD"),
)

# By name: a script, whose end and whose lines must be the same whoever has started it.
ENDS = {
    "well": "import sys; print(sys.argv[1:], __name__, sys.stdin.read() == '')",
    "a number": "import sys; sys.exit(7)",
    "a text": "import sys; sys.exit('no more')",
    "an error": "def f():\n    raise ValueError('wrong')\nf()",
    "at once": "import os; print('x', end=''); os._exit(3)",
    "a mistake": "import os\nprint(1\n",
    "told to leave": "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "import os; os.abort()",
    "handlers at the end": "import atexit; atexit.register(print, 'the end'); import sys; sys.stderr.write('no line')",
    "a thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "children": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.flags)'])",
    "a fork": "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nprint('parent' if pid else 'child')",
    "processes": (
        "import multiprocessing as mp\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    for how in ('fork', 'spawn', 'forkserver'):\n"
        "        with mp.get_context(how).Pool(1) as pool:\n"
        "            print(how, pool.map(double, [1, 2]))\n"
    ),
    "loaders": (
        "import torch\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Numbers(Dataset):\n"
        "    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, i):\n        return torch.full((2, 2), float(i)) @ torch.ones(2, 2)\n"
        "if __name__ == '__main__':\n"
        "    for how, count in (('fork', 2), ('spawn', 1)):\n"
        "        loader = DataLoader(Numbers(), num_workers=count, multiprocessing_context=how)\n"
        "        print(how, torch.cat(list(loader)).sum(), torch.cuda.is_initialized())\n"
    ),
}


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children do not ignore SIGINT, though the shell that runs the tests in the background does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def surroundings(place: Place, preload: str, workers: int) -> list[dict[str, Any]]:
    """What each worker saw."""
    out = place.work / "out"
    out.mkdir(exist_ok=True)
    flags = ("--servers", "1", "--workers", str(workers), "--set", f"cluster.preload={preload}")
    place.paramserver("run", SCRIPTS / "surroundings.py", *flags, "--", out, "a word", "--set").check()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(workers)]


def test_a_script_sees_the_same_and_draws_other_numbers(place: Place) -> None:
    """Arguments, main module, paths, variables, streams, descriptors, signals, limits, threads, session, parent."""
    forked, [alone] = surroundings(place, "true", 2), surroundings(place, "false", 1)
    for one in (*forked, alone):
        one["seen"]["environment"] = {
            name: value for name, value in one["seen"]["environment"].items() if not name.endswith(OWN)
        }
    # Under the same rank the workers have the same variables.
    forked[1]["seen"]["environment"] = forked[0]["seen"]["environment"]
    for one in forked:
        for fact, value in alone["seen"].items():
            assert one["seen"][fact] == value, fact
    assert forked[0]["parent"] == forked[1]["parent"]
    for kind in forked[0]["drawn"]:
        assert len({one["drawn"][kind] for one in (*forked, alone)}) == 3, kind


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
def test_scripts_end_in_the_same_way(tmp_path: Path) -> None:
    async def go() -> dict[str, Any]:
        async with Nursery(tmp_path, os.environ) as nursery:
            pairs = await asyncio.gather(*(nursery.both(text, "an argument") for text in ENDS.values()))
            assert nursery.said == []
            return dict(zip(ENDS, pairs, strict=True))

    for name, (forked, alone) in asyncio.run(go()).items():
        assert forked.code == alone.code, (name, forked, alone)
        assert sorted(forked.lines) == sorted(alone.lines), name


def test_the_process_is_a_child_of_the_launcher_and_dies_with_its_data_loaders(tmp_path: Path) -> None:
    text = (
        "import os, time, multiprocessing as mp\n"
        "child = mp.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "child.start()\nprint(os.getppid(), child.pid)\ntime.sleep(60)\n"
    )

    async def go() -> None:
        async with Nursery(tmp_path, os.environ) as nursery:
            child, lines = await nursery.begin(nursery.forking, text)
            async with asyncio.timeout(60.0):
                while not lines:
                    await asyncio.sleep(0.01)
            parent, loader = map(int, lines[0].split())
            assert parent == os.getpid()
            assert os.getpgid(loader) == child.pid
            child.kill()
            assert await nursery.end(child) == -signal.SIGKILL
            until("its children have ended", lambda: not is_alive(loader), 10.0)

    asyncio.run(go())


@pytest.mark.long
def test_a_process_that_imports_little_does_not_wait_for_the_imports(tmp_path: Path) -> None:
    async def go() -> None:
        text = "import sys; print('torch' in sys.modules)"
        async with Nursery(tmp_path, os.environ) as nursery:
            found = [(await nursery.run(nursery.forking, text, light=light)).lines for light in (True, False, True)]
            assert found == [["False"], ["True"], ["True"]]

    asyncio.run(go())


@pytest.mark.long
def test_a_crash_is_told_by_faulthandler(tmp_path: Path) -> None:
    async def go() -> None:
        async with Nursery(tmp_path, {**os.environ, "PYTHONFAULTHANDLER": "1"}) as nursery:
            ended = await nursery.run(nursery.forking, "import ctypes; ctypes.string_at(0)")
            assert ended.code == -signal.SIGSEGV
            assert ended.lines[0] == "Fatal Python error: Segmentation fault"
            assert nursery.said == []

    asyncio.run(go())


def test_a_preloaded_process_that_is_killed_is_replaced_and_its_processes_go_on(tmp_path: Path) -> None:
    async def go() -> None:
        async with Nursery(tmp_path, os.environ) as nursery:
            first, lines = await nursery.begin(
                nursery.forking, "import time; print('here', flush=True); time.sleep(60)"
            )
            nursery.preloads[0].kill()
            assert nursery.preloads[0].exited is not None
            await asyncio.wait([nursery.preloads[0].exited], timeout=10.0)
            # Whether the next preloaded process is there already or not, a process starts.
            second = await nursery.run(nursery.forking, "import sys; print('torch' in sys.modules)")
            assert second.code == 0
            third = await nursery.run(nursery.forking, "import sys; print('torch' in sys.modules)")
            assert third.lines == ["True"]
            assert len(nursery.preloads) == 2
            assert first.running
            assert any("signal 9), and another one is started" in line for line in nursery.said), nursery.said
            first.kill()
            await nursery.end(first)
            assert lines == ["here"]

    asyncio.run(go())


def test_a_preloaded_process_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'paramserver.roles.preloaded' in sys.orig_argv:\n    os.kill(os.getpid(), 9)\n"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))

    async def go() -> None:
        async with Nursery(tmp_path, {**os.environ, "PYTHONPATH": path}) as nursery:
            async with asyncio.timeout(60.0):
                while not any("processes start without it" in line for line in nursery.said):
                    await asyncio.sleep(0.01)
            assert len(nursery.preloads) == 4
            assert (await nursery.run(nursery.forking, "print('here')")).lines == ["here"]

    asyncio.run(go())


@pytest.mark.parametrize(
    ("surrounding", "reason"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "it has 2 threads"),
        pytest.param(
            "import sys; sys.setprofile(lambda *_: None)",
            "a debugger, a profiler or a tool for coverage watches it",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_process_that_must_not_be_forked_says_why(tmp_path: Path, surrounding: str, reason: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(surrounding)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))

    async def go() -> None:
        async with Nursery(tmp_path, {**os.environ, "PYTHONPATH": path}) as nursery:
            assert (await nursery.run(nursery.forking, "import sys; print('torch' in sys.modules)")).lines == ["False"]
            async with asyncio.timeout(10.0):
                while not nursery.said:
                    await asyncio.sleep(0.01)
            assert [
                line.startswith(f"processes start without a preloaded process: {reason}") for line in nursery.said
            ] == [True]

    asyncio.run(go())


def test_what_is_preloaded_starts_no_thread_and_touches_no_gpu() -> None:
    code = (
        "from paramserver.roles import preloaded\nfrom paramserver.preload.forking import obstacle, threads\n"
        "preloaded._load()\nimport torch\n"
        "assert not obstacle(), obstacle()\nassert threads() == 1\nassert not torch.cuda.is_initialized()"
    )
    # With more than one thread, OpenBLAS starts some when NumPy is imported.
    environ = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_killed_members_are_back_soon(place: Place) -> None:
    """An idle machine needs a quarter of a second: `python -m benchmarks start` measures it."""
    running = training(place, 1, 2)

    def pid(name: str) -> int:
        return next((p["pid"] for p in status_of(running)["processes"] if p["name"] == name and not p["gone"]), 0)

    def kill(name: str) -> int:
        """Kill it as soon as the status has it; 0 would be this process and all of its group."""
        before = int(until(f"{name} is there", partial(pid, name), 10.0))
        os.kill(before, signal.SIGKILL)
        return before

    def again(name: str, before: int) -> bool:
        return pid(name) not in (0, before)

    for name in ("server-0", "worker-1"):
        before = kill(name)
        begin = time.monotonic()
        until(f"another {name}", partial(again, name, before), 10.0)
        print(f"{name} again after {time.monotonic() - begin:.2f} s")
    running.wait_for(r"worker-1 \| rank 1 of 2 trains", count=2)
    [preloaded] = [pid for pid, words in place.processes().items() if "roles.preloaded" in words]
    os.kill(preloaded, signal.SIGKILL)
    running.wait_for("the preloaded process ended unexpectedly \\(signal 9\\), and another one is started")
    kill("worker-1")
    running.wait_for(r"worker-1 \| rank 1 of 2 trains", count=3)
    running.send(signal.SIGTERM)
    running.wait().check(143)
