"""A torch without the private names that this package uses, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

# Torch's own code keeps its names: only the look-up of this package does not find them.
SCRIPT = """
import builtins, sys
import torch, torch.overrides

find = builtins.getattr
def without(owner, name, *default):
    here = sys._getframe(1).f_code.co_filename.endswith("tensors/private.py")
    return default[0] if here and default else find(owner, name, *default)
builtins.getattr = without
from paramserver.tensors import private
builtins.getattr = find
import paramserver as ps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.inner(x))))

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.ones(64, 1))

def trained(ctx):
    torch.manual_seed(1)
    model, loader = Net(), DataLoader(data, batch_size=8)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    if ctx:
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for epoch in range(2):
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ctx.state_dict()["model"] if ctx else model.state_dict()

with ps.init() as ctx:
    found = trained(ctx)
for name, value in trained(None).items():
    # 16 steps; another way to round one step moves a number by some units of the last place.
    assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name
assert not private.FUSED and private.function_modes() is None
"""


def test_a_torch_without_private_names_trains_the_plain_way_and_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "lacks names" in line)
    for name in ("torch._foreach_copy_", "torch._fused_adagrad_", "_get_current_function_mode_stack", "torch._compile"):
        assert name in line
