"""The image: what is in it, how it runs, and that it is not built with the wrong torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.compose.harness import BUILD_IMAGE, BUILD_S, ROOT, Done, run

pytestmark = pytest.mark.timeout(1800)

CHECK_TORCH = ROOT / "docker" / "check_torch.py"
LOCKED_UP = (
    *("--rm", "--read-only", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "ALL", "--network", "none"),
    *("--security-opt", "no-new-privileges", "--pids-limit", "512", "--memory", "2g"),
)


def in_image(image: str, code: str) -> str:
    """What some Python code prints inside."""
    return run("docker", "run", *LOCKED_UP, "--entrypoint", "python", image, "-c", code).out.strip()


def fake_torch(directory: Path, cuda: str | None) -> None:
    package = directory / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (package / "version.py").write_text(f"__version__ = '2.13.0+test'\ncuda = {cuda!r}\nhip = None\n")


def test_it_says_its_version(image: str) -> None:
    assert run("docker", "run", *LOCKED_UP, image, "--version").out.startswith("paramserver ")


def test_no_cuda(image: str) -> None:
    assert in_image(image, "import torch; print(torch.version.cuda, torch.version.hip)") == "None None"
    listing = "import importlib.metadata as m; print(*sorted(d.name.lower() for d in m.distributions()))"
    packages = in_image(image, listing).split()
    assert "torch" in packages
    assert not [name for name in packages if name.startswith("nvidia") or name == "triton"]


def test_only_what_runs_is_in_it(image: str) -> None:
    packages = in_image(image, "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))")
    assert not {"pytest", "mypy", "ruff", "hypothesis", "hatchling"} & set(packages.split())
    names = ("(", "-name", "*.whl", "-o", "-path", "*/torch/include", "-o", "-path", "*/torch/test", ")")
    found = run("docker", "run", *LOCKED_UP, "--entrypoint", "find", image, "/", "-xdev", *names, check=False).out
    # Python's own ensurepip may bring wheels.
    assert not [line for line in found.splitlines() if "ensurepip" not in line and "python-wheels" not in line]


def test_it_has_compiled_kernels_and_no_compiler(image: str) -> None:
    report = in_image(image, "from paramserver.server.arithmetic import compiled; print(compiled.report())")
    assert report.startswith("compiled: "), report
    assert in_image(image, "import shutil; print(shutil.which('cc'), shutil.which('gcc'))") == "None None"


def build_wheel(*options: str) -> Done:
    """The stage that builds the wheel, in an image without a compiler and without a network."""
    where = ("--network", "none", "--build-arg", "BUILD_IMAGE=python:3.11-slim")
    command = ("docker", "build", "-f", "docker/Dockerfile", "--target", "wheel", "--force-rm", *where, *options, ".")
    return run(*command, check=False, deadline_s=BUILD_S)


def test_without_a_compiler_the_build_stops_and_says_what_to_do(image: str) -> None:
    done = build_wheel()
    assert done.code != 0
    assert "BUILD_IMAGE has no C compiler, and apt-get could not install one" in done.said
    assert "--build-arg BUILD_IMAGE=python:3.11" in done.said
    assert "--build-arg KERNELS=no" in done.said


def test_who_does_without_kernels_needs_no_compiler(image: str) -> None:
    tag = "paramserver:test-wheel"
    try:
        done = build_wheel("--build-arg", "KERNELS=no", "--tag", tag)
        assert done.code == 0, done.said
        listing = run("docker", "run", *LOCKED_UP, "--entrypoint", "ls", tag, "/build/dist").out.split()
        assert listing == ["paramserver-0.1.0-py3-none-any.whl"]
    finally:
        run("docker", "rmi", "-f", tag)


def test_its_size(image: str) -> None:
    facts = json.loads(run("docker", "image", "inspect", image).out)[0]
    layers = [
        line.split("\t")
        for line in run("docker", "history", "--no-trunc", "--format", "{{.Size}}\t{{.CreatedBy}}", image).out.split(
            "\n"
        )
        if line and not line.startswith("0B")
    ]
    print(f"\nimage: {facts['Size'] / 1e6:.0f} MB")
    for size, made_by in layers:
        print(f"  {size:>8}  {made_by[:80]}")
    assert facts["Size"] < 1.3e9


def test_its_facts(image: str) -> None:
    config = json.loads(run("docker", "image", "inspect", image).out)[0]["Config"]
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", "paramserver", "health"]
    assert config["Entrypoint"] == ["paramserver"]
    assert "PYTHONUNBUFFERED=1" in config["Env"]


def test_the_digits_train_offline_and_read_only(image: str) -> None:
    done = run("docker", "run", *LOCKED_UP, "--entrypoint", "python", image, "workers/digits.py", "--epochs", "3")
    accuracy = float(done.out.strip().splitlines()[-1].split()[-1])
    assert accuracy > 0.9


def test_nobody_is_well_where_nothing_runs(image: str) -> None:
    done = run("docker", "run", *LOCKED_UP, image, "health", check=False)
    assert done.code == 5


@pytest.mark.parametrize(
    ("variant", "cuda", "complaint"),
    [
        ("cpu", None, ""),
        ("cpu", "13.0", "docker/wheels"),
        ("gpu", None, "built without GPU support"),
        ("gpu", "13.0", ""),
    ],
)
def test_the_check_of_torch(tmp_path: Path, variant: str, cuda: str | None, complaint: str) -> None:
    fake_torch(tmp_path, cuda)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(CHECK_TORCH), variant]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if complaint else 0), done.stderr
    assert complaint in done.stderr


def fake_wheel(directory: Path, cuda: str) -> Path:
    """A wheel of a torch that says that it is built for this CUDA."""
    fake_torch(directory, cuda)
    path = directory / "torch-2.13.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in (directory / "torch").iterdir():
            wheel.write(file, f"torch/{file.name}")
        info = "torch-2.13.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_a_torch_with_cuda_stops_the_build(tmp_path: Path) -> None:
    """The whole way: a wheel of such a torch lies in docker/wheels."""
    context = tmp_path / "context"
    for name in ("docker", "paramserver", "workers"):
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("*.whl", "__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, context / name)
    shutil.copy(fake_wheel(tmp_path / "fake", "13.0"), context / "docker/wheels")
    file = str(context / "docker/Dockerfile")
    given = ("--build-arg", f"BUILD_IMAGE={BUILD_IMAGE}", "--build-arg", "HASHES=no")  # that would not even take it
    command = ("docker", "build", "--force-rm", "-f", file, *given, str(context))
    done = run(*command, check=False, deadline_s=BUILD_S)
    assert done.code != 0
    assert "is built for GPUs (CUDA 13.0)" in done.said
    assert "PIP_EXTRA_INDEX_URL" in done.said


def test_the_variant_for_gpus_takes_the_torch_of_its_base_image(image: str, tmp_path: Path) -> None:
    """With a base image that is as pytorch/pytorch is in this: pip has installed a torch with CUDA there."""
    fake_wheel(tmp_path / "fake", "13.0")
    (tmp_path / "fake" / "Dockerfile").write_text(
        "FROM python:3.11-slim\n"
        "COPY torch-2.13.0-py3-none-any.whl /tmp/\n"
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1\n"
        "RUN python3 -m pip install --no-index --no-deps /tmp/torch-2.13.0-py3-none-any.whl\n"
    )
    base, tag = "paramserver:test-base-gpu", "paramserver:test-gpu"
    try:
        run("docker", "build", "-t", base, str(tmp_path / "fake"))
        arguments = ("VARIANT=gpu", f"BASE_IMAGE={base}", f"BUILD_IMAGE={BUILD_IMAGE}")
        options = [word for argument in arguments for word in ("--build-arg", argument)]
        run("docker", "build", "-f", "docker/Dockerfile", *options, "-t", tag, ".", deadline_s=BUILD_S)
        where = "from importlib.util import find_spec as f; print(f('torch').origin, f('paramserver').origin)"
        torch, package = in_image(tag, where).split()
        assert not torch.startswith("/opt/paramserver/")
        assert package.startswith("/opt/paramserver/")
        assert run("docker", "run", *LOCKED_UP, tag, "--version").out.startswith("paramserver ")
    finally:
        run("docker", "rmi", "-f", tag, base)
