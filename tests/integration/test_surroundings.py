"""What scripts of `run` get from their surroundings: standard input, modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.integration.harness import SCRIPTS, Place, complaint, place_fixture
from tests.support.integration.paced import counts


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def test_each_worker_reads_all_that_comes_through_a_pipe(place: Place) -> None:
    command = [sys.executable, "-m", "paramserver", "run", str(SCRIPTS / "reads.py"), *counts(1, 2)]
    done = place.start("sh", "-c", 'printf "one\\ntwo\\n" | "$@"', "sh", *command).wait().check()
    for worker in range(2):
        assert f"worker-{worker} | reads ['one', 'two']\n" in done.out


@pytest.mark.long
def test_reading_from_a_terminal_fails(place: Place) -> None:
    """What one person types cannot be the data of several workers."""
    command = [sys.executable, "-m", "paramserver", "run", str(SCRIPTS / "reads.py"), *counts(1, 1)]
    spawned = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:], lambda fd: __import__('os').read(fd, 4096)) >> 8)"
    done = place.start(sys.executable, "-c", spawned, *command).wait()
    assert "the workers of a run cannot read what a person types" in " ".join(complaint(done, 2).split())


def test_a_module_of_a_package_beside_files_with_the_names_of_other_modules(place: Place) -> None:
    """The package imports its own modules, and our processes import none of them."""
    for name in ("queue", "copy", "asyncio", "structlog"):
        (place.work / f"{name}.py").write_text("raise RuntimeError('not the module that was wanted')\n")
    (place.work / "redis.py").write_text("OWN = 'redis of the script'\n")
    package = place.work / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("import redis\n")
    head = "import sys\nfrom .other import redis\nprint(redis.OWN, __package__, sys.argv[1:])\n"
    (package / "train.py").write_text(
        (SCRIPTS / "tiny.py").read_text().replace("import torch\n", f"{head}import torch\n", 1)
    )
    done = place.paramserver("run", "-m", "pkg.train", *counts(1, 1), "--", "an argument").check()
    assert "worker-0 | redis of the script pkg ['an argument']\n" in done.out
    assert "everything promised is there" in done.out
