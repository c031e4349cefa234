"""Compiles paramserver/kernels/kernels.c as the package is installed. Without a C compiler it is installed without."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Each operation rounds as it is written, so that the bits are torch's.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FOLDER = "paramserver/kernels"


class KernelsBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside its source: into the wheel, or into the checkout that is installed as editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is put together, also an editable one (``version`` is then "editable")."""
        folder = Path(self.root, FOLDER)
        self._made = Path(tempfile.mkdtemp())
        library = (folder if version == "editable" else self._made) / "_kernels.so"
        problem = compile_kernels(folder / "kernels.c", library)
        if problem:
            self.app.display_warning(f"paramserver is installed without its compiled kernels ({problem})")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = f"{FOLDER}/_kernels.so"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is there."""
        shutil.rmtree(self._made, ignore_errors=True)


def compile_kernels(source: Path, target: Path) -> str:
    """Compile ``source`` to the shared library ``target``; what went wrong, or nothing.

    The compiler is what CC says, or cc. A target from before is removed if there is no new one.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    fingerprint = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    made = target.with_suffix(f".{os.getpid()}")
    command = [*compiler, *FLAGS, f'-DSOURCE="{fingerprint}"', str(source), "-o", str(made), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        said = done.stderr.strip().splitlines() or ["the compiler failed"]
        problem = next((line for line in said if "error" in line), said[-1]) if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        made.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
    else:
        made.replace(target)
    return problem
