"""Train a small convolutional network on the handwritten digits that scikit-learn ships.

python workers/digits.py                                       alone, in one process
paramserver run workers/digits.py --servers 2 --workers 2      on a cluster on this machine
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps


class DigitsNet(nn.Module):
    """Two convolutions with BatchNorm, then two linear layers: 8 × 8 pixels in, 10 scores out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),  # (batch, 16, 8, 8)
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),  # (batch, 32, 8, 8)
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (batch, 32, 4, 4)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.features(x))
        return scores


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,347 digits to train on and 450 to test on, the same at every call."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
    y = torch.tensor(labels, dtype=torch.int64)
    train, test = train_test_split(range(len(y)), test_size=0.25, random_state=0, stratify=labels)
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    model.eval()
    x, y = (tensor.to(device) for tensor in data.tensors)
    correct = (model(x).argmax(dim=1) == y).float().mean().item()
    model.train()
    return correct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a slice")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    args = parser.parse_args()

    ctx = ps.init()
    train, test = load_data()
    model = DigitsNet(args.dropout)
    loader = ctx.prepare(DataLoader(train, batch_size=args.batch_size, shuffle=True, num_workers=args.num_workers))
    if args.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr or 0.02, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr or 0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)

    for epoch in ctx.epochs(args.epochs):  # where the job stands, also for one who joins late
        for x, y in loader:  # this worker's slices
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()  # contributes; returns with the next version of the weights, or with work
            scheduler.step()
            optimizer.zero_grad()
            ctx.log(loss=loss)
        if ctx.is_main:
            print(f"epoch {epoch + 1}: test accuracy {accuracy(model, test, ctx.device):.4f}", flush=True)
    if ctx.is_main:
        ctx.log(test_accuracy=accuracy(model, test, ctx.device))
    ctx.close()


if __name__ == "__main__":
    main()
