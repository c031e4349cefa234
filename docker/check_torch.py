"""Refuse a torch that does not belong into the image: check_torch.py cpu | gpu."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

NO_TORCH = """\
BASE_IMAGE has no torch that can be used here. For VARIANT=gpu give an image that has one, a pytorch/pytorch runtime
image for example: docker build --build-arg VARIANT=gpu --build-arg BASE_IMAGE=...
"""
SECOND_TORCH = """\
Another torch than that of BASE_IMAGE was about to be installed, since that one is too old for this project.
Give a newer BASE_IMAGE.
"""
NO_GPU = """\
The torch of BASE_IMAGE ({version}) is built without GPU support, but VARIANT is gpu. Give another BASE_IMAGE.
"""
WRONG_TORCH = """\
torch {version} is built for GPUs ({platform}): its libraries would make this image several gigabytes larger.
Give the build for CPUs, in one of two ways:
  - put its wheel into docker/wheels (`make docker-wheels` with pip set up for PyTorch's CPU index does it), or
  - name PyTorch's CPU index: docker build --build-arg PIP_EXTRA_INDEX_URL=...
For an image for GPUs see VARIANT in docker/Dockerfile.
"""


def problem(variant: str) -> str | None:
    """The sentence that refuses the installed torch; None if the torch fits."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return NO_TORCH
    folder = Path(spec.origin).parent
    facts = runpy.run_path(str(folder / "version.py"))  # importing torch takes packages that come later
    names = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
    platforms = [f"{name} {facts[key]}" for key, name in names.items() if facts.get(key)]
    if variant == "gpu":
        if folder.is_relative_to(sys.prefix):
            return SECOND_TORCH
        return None if platforms else NO_GPU.format(version=facts["__version__"])
    return WRONG_TORCH.format(version=facts["__version__"], platform=", ".join(platforms)) if platforms else None


if __name__ == "__main__":
    if message := problem(sys.argv[1]):
        sys.exit(message)
