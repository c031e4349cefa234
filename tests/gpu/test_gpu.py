"""What only a GPU can show. Not part of ``make test``: run ``make test-gpu`` on a machine that has one.

The same code paths run on the CPU in tests/cluster and tests/integration; here the tensors are on CUDA devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "workers" / "digits.py")


def test_there_is_a_gpu() -> None:
    assert torch.cuda.is_available(), "make test-gpu needs a machine with a CUDA device"


def run(tmp_path: Path, *arguments: str, script: str = DIGITS, script_args: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train, by default the digits, on a cluster of processes that share the GPU; the summary."""
    summary = tmp_path / f"{'-'.join(arguments)}.json".replace("/", "_")
    command = [sys.executable, "-m", "paramserver", "run", script, *arguments, "--summary", str(summary)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--", *script_args], capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def alone(tmp_path: Path, *script_args: str) -> dict[str, Any]:
    """The same script in one process."""
    summary = tmp_path / "alone.json"
    environment = {
        **os.environ,
        "PARAMSERVER_RUN__SUMMARY": str(summary),
        "PARAMSERVER_TRAINING__SLICES_PER_STEP": "4",
    }
    subprocess.run([sys.executable, DIGITS, *script_args], env=environment, check=True, timeout=240, cwd=tmp_path)
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def test_sync_digests_do_not_depend_on_workers_and_servers(tmp_path: Path) -> None:
    script = ("--epochs", "3", "--optimizer", "adamw", "--dropout", "0.2")
    results = [alone(tmp_path, *script)]
    for workers, servers in ((1, 1), (2, 2), (3, 2)):
        arguments = ("--workers", str(workers), "--servers", str(servers), "--slices-per-step", "4")
        results.append(run(tmp_path, *arguments, script_args=script))
    for key in ("weights_sha256", "optimizer_sha256", "buffers_sha256"):
        assert len({result[key] for result in results}) == 1, [result[key] for result in results]
    print("samples/s:", [result["samples_per_s"] for result in results])


@pytest.mark.parametrize("mode", [("--mode", "sync"), ("--mode", "async", "--staleness", "4")])
def test_digits_accuracy(tmp_path: Path, mode: tuple[str, ...]) -> None:
    result = run(tmp_path, "--workers", "2", "--servers", "2", *mode)
    print(mode, result["samples_per_s"], "samples/s", result["metrics"])
    assert result["metrics"]["test_accuracy"] >= 0.97


def test_gradients_that_leave_early_over_sockets_have_the_same_bits(tmp_path: Path) -> None:
    """A transformer of 10.9 M parameters; over shared memory nothing leaves early."""
    script = str(ROOT / "benchmarks" / "scripts" / "train.py")
    words = ("--case", "transformer", "--batch", "8", "--steps", "30", "--skip", "5", "--ranks", "2")
    found = []
    for transport in ("shm", "bulk"):
        out = tmp_path / f"{transport}.json"
        arguments = ("--workers", "2", "--servers", "2", "--set", f"cluster.transport={transport}")
        summary = run(tmp_path, *arguments, script=script, script_args=(*words, "--out", str(out)))
        found.append(summary["weights_sha256"])
        print(f"{transport}: {json.loads(out.read_text())['step_s'] * 1000:.1f} ms per step")
    assert found[0] == found[1]


def train(autocast: bool, steps: int = 30, scale: float = 2.0**16) -> tuple[list[float], int, nn.Module]:
    """A small model on the GPU, alone, with automatic mixed precision and a loss scale that overflows at first."""
    ctx = ps.init()
    data = TensorDataset(torch.randn(64 * steps, 32), torch.randint(0, 4, (64 * steps,)))
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer, loader = ctx.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=64)
    )
    scaler = torch.amp.GradScaler("cuda", init_scale=scale, enabled=autocast)
    losses = []
    for _ in ctx.epochs(1):
        for x, y in loader:
            assert x.is_cuda
            with torch.autocast("cuda", torch.float16, enabled=autocast):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    skipped = ctx.engine.weights.skipped
    ctx.close()
    return losses, skipped, model


def test_grad_scaler_works_unchanged() -> None:
    _, skipped, model = train(autocast=True, scale=2.0**40)
    assert skipped > 0, "the overflow did not happen"
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    losses, skipped, _ = train(autocast=True)
    assert skipped <= 2
    assert losses[-1] < 2.0


def test_weights_are_views_of_one_flat_tensor_on_the_gpu() -> None:
    _, _, model = train(autocast=False, steps=2)
    parameters = list(model.parameters())
    assert all(p.is_cuda for p in parameters)
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == 1


def test_exchange_of_a_large_model() -> None:
    """64 M parameters on the GPU: prints how long a step's communication and update take."""
    ctx = ps.init()
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    import time

    seconds = []
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    assert ctx.version == 4
    ctx.close()
    print(f"step of {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters: {sorted(seconds)[1]:.3f} s")
