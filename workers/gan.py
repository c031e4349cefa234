"""Train two models against each other: a generator that forges handwritten digits, and a critic that finds forged ones.

python workers/gan.py                                       alone, in one process
paramserver run workers/gan.py --servers 2 --workers 2      on a cluster on this machine
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps

SHADES = " .:-=+*#%@"


class Generator(nn.Module):
    """Noise in, (batch, 1, 8, 8) shades from 0 to 1 out."""

    def __init__(self, noise: int = 16, width: int = 128) -> None:
        super().__init__()
        self.noise = noise
        self.layers = nn.Sequential(
            nn.Linear(noise, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, 64),
        )

    def forward(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.layers(z)).view(-1, 1, 8, 8)


class Critic(nn.Module):
    """(batch, 1, 8, 8) shades in, a score out: above 0 for images that it takes for real."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


def load_data() -> TensorDataset:
    """1,797 images of digits, the same at every call."""
    images, _ = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0)


def critic_loss(generator: nn.Module, critic: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    """The critic is to score real images high, and forged ones low."""
    forged = generator(noise).detach()
    return F.softplus(-critic(real)).mean() + F.softplus(critic(forged)).mean()


def generator_loss(generator: nn.Module, critic: nn.Module, noise: Tensor) -> Tensor:
    """The critic is to score forged images high."""
    return F.softplus(-critic(generator(noise))).mean()


def frechet(real: Tensor, forged: Tensor) -> float:
    """The Fréchet distance of two sets of images (samples, ...), each taken for a normal distribution of its pixels.

    >>> frechet(torch.eye(3), torch.eye(3)) < 1e-6
    True
    """
    one, other = (images.flatten(1).double() for images in (real, forged))
    spread = torch.linalg.eigvals(torch.cov(one.T) @ torch.cov(other.T)).sqrt().real.sum()
    variance = one.var(dim=0).sum() + other.var(dim=0).sum()
    return float((one.mean(dim=0) - other.mean(dim=0)).square().sum() + variance - 2 * spread)


@torch.no_grad()
def forge(generator: Generator, count: int, device: torch.device) -> Tensor:
    """So many forged images, the same at every call for the same weights."""
    generator.eval()
    noise = torch.randn(count, generator.noise, generator=torch.Generator().manual_seed(1)).to(device)
    images: Tensor = generator(noise).cpu()
    generator.train()
    return images


def drawn(images: Tensor) -> str:
    """A row of images as text."""
    rows = [" ".join("".join(SHADES[int(v * 9.99)] * 2 for v in image[0, row]) for image in images) for row in range(8)]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a slice")
    parser.add_argument("--critic-steps", type=int, default=1, help="steps of the critic on each batch")
    parser.add_argument("--lr", type=float, default=0.001)
    args = parser.parse_args()

    ctx = ps.init()
    torch.manual_seed(0)
    data, generator, critic = load_data(), Generator(), Critic()
    of_generator = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.999))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    critic, of_critic = ctx.prepare(critic, of_critic, name="critic", turns=args.critic_steps)
    generator, of_generator, loader = ctx.prepare(generator, of_generator, loader, name="generator")

    for epoch in ctx.epochs(args.epochs):
        for (real,) in loader:
            for _ in range(args.critic_steps):
                noise = torch.randn(len(real), generator.noise, device=ctx.device)  # seeded for each batch
                of_critic.zero_grad()
                loss = critic_loss(generator, critic, real, noise)
                loss.backward()
                of_critic.step()
            ctx.log(critic=loss)
            of_generator.zero_grad()
            loss = generator_loss(generator, critic, torch.randn(len(real), generator.noise, device=ctx.device))
            loss.backward()
            of_generator.step()
            ctx.log(generator=loss)
        if ctx.is_main:
            distance = frechet(data.tensors[0], forge(generator, len(data), ctx.device))
            print(f"epoch {epoch + 1}: Fréchet distance {distance:.3f}", flush=True)
    if ctx.is_main:
        print(drawn(forge(generator, 6, ctx.device)), flush=True)
    ctx.close()


if __name__ == "__main__":
    main()
