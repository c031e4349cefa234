"""A plain loop over the epochs, and nothing at its end: `plain_loop.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

EPOCHS = 3

ctx = ps.init()
data = TensorDataset(torch.randn(200, 8), torch.randint(2, (200,)))
model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
scheduler = ctx.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=EPOCHS * len(loader)))
for _ in range(EPOCHS):
    for x, y in loader:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
