"""workers/finetune.py with the real peft and transformers, which ``make test-frameworks`` installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "32", "--layers", "2", "--rank", "4", "--pieces", "64"]


def test_adapters_are_trained_by_a_cluster(tmp_path: Path) -> None:
    summary, adapters = tmp_path / "summary.json", tmp_path / "adapters"
    run = ["paramserver", "run", "workers/finetune.py", "--servers", "2", "--workers", "2", "--summary", str(summary)]
    done = subprocess.run(
        [sys.executable, "-m", *run, "--", *SMALL, "--save", str(adapters)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of which 1024 are trained and travel" in done.stdout
    assert json.loads(summary.read_text())["steps"] == 4
    saved = load_file(adapters / "adapter_model.safetensors")
    assert sum(value.numel() for value in saved.values()) == 1024
    assert any(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)
