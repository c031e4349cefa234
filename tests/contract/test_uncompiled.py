"""Optimizers without torch's compiler, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch
from paramserver.tensors.uncompiled import postpone_compiler, step
postpone_compiler()
postpone_compiler()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.5)
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
(2.0 * weight).sum().backward()
step(optimizer)
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert weight.tolist() == [0.0] * 3 and weight.grad is None
assert "torch._dynamo" not in sys.modules, "the compiler was loaded"
weight.grad = torch.ones(3)
optimizer.step()
assert "torch._dynamo" in sys.modules, "torch itself loads it no more: uncompiled.py is not needed any longer"
assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
assert torch.optim.Optimizer.state_dict.__wrapped__.__dynamo_disable is not None
assert "plain" not in torch.optim.Optimizer.state_dict.__wrapped__.__dynamo_disable.__qualname__
"""


def test_a_process_that_compiles_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
