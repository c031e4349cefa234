"""The models of workers/gan.py at a small size: forged digits come nearer to real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from paramserver.worker.context import Context
from tests.support.cluster.harness import train
from tests.support.cluster.programs import fill, generator
from workers import gan


def test_forged_digits_come_nearer_and_one_worker_makes_the_bits_of_two() -> None:
    real = gan.load_data().tensors[0][:192]
    distances: list[tuple[float, float]] = []

    def script(ctx: Context) -> None:
        forger: Any = fill(gan.Generator(noise=4, width=24))
        critic: Any = fill(gan.Critic(width=24))
        of_forger, of_critic = (torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in (forger, critic))
        loader: Any = DataLoader(TensorDataset(real), batch_size=16, shuffle=True)
        critic, of_critic = ctx.prepare(critic, of_critic, name="critic")
        forger, of_forger, loader = ctx.prepare(forger, of_forger, loader, name="generator")
        before = gan.frechet(real, gan.forge(forger, len(real), ctx.device))
        for _ in ctx.epochs(6):
            for (images,) in loader:
                noise = torch.randn(len(images), 4, generator=generator(ctx.slice_seed("noise")))
                of_critic.zero_grad()
                gan.critic_loss(forger, critic, images, noise).backward()  # type: ignore[no-untyped-call]
                of_critic.step()
                of_forger.zero_grad()
                gan.generator_loss(forger, critic, noise).backward()  # type: ignore[no-untyped-call]
                of_forger.step()
        distances.append((before, gan.frechet(real, gan.forge(forger, len(real), ctx.device))))

    one, two = (train(script, workers, 2, slices_per_step=2) for workers in (1, 2))
    assert one.digests == two.digests
    for before, after in distances:
        assert after < 0.8 * before, distances


def test_images_are_drawn_as_text() -> None:
    assert gan.drawn(torch.ones(2, 1, 8, 8)).splitlines() == ["@" * 16 + " " + "@" * 16] * 8
