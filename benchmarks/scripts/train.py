"""The trainings that `benchmarks.train` measures: the digits, and a transformer of 10 M parameters.

`beside_ddp` trains them on both sides.
"""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.scripts.beside_ddp import Training, parser, train

VOCABULARY, TOKENS = 256, 64
WIDTH, LAYERS, HEADS = 384, 6, 6


class Transformer(nn.Module):
    """Predicts the next of 64 tokens; 10.9 M parameters. Takes (batch, 64) token numbers, gives a score for each."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(self.token(x) + self.position, mask=self.mask, is_causal=True)
        scores: Tensor = self.scores(hidden)
        return scores.transpose(1, 2)


def network(case: str) -> nn.Module:
    digits = import_module("workers.digits")

    torch.manual_seed(1)
    return digits.DigitsNet() if case == "digits" else Transformer()


def optimizer_of(case: str, model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    if case == "digits":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=fused)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)


def data(case: str, samples: int) -> TensorDataset:
    """So many samples: the digits again and again, or text in which a token mostly follows from the previous token."""
    if case == "digits":
        x, y = import_module("workers.digits").load_data()[0].tensors
        again = torch.arange(samples) % len(y)
        return TensorDataset(x[again], y[again])
    numbers = torch.Generator().manual_seed(2)
    text = torch.randint(VOCABULARY, (samples, TOKENS + 1), generator=numbers)
    follows = torch.rand(samples, TOKENS, generator=numbers) < 0.8
    for at in range(TOKENS):
        text[:, at + 1] = torch.where(follows[:, at], (text[:, at] * 7 + 3) % VOCABULARY, text[:, at + 1])
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def main() -> None:
    own = parser(__doc__)
    own.add_argument("--case", choices=["digits", "transformer"], required=True)
    args = own.parse_args()
    training = Training(
        network=lambda: network(args.case),
        optimizer=lambda model, fused: optimizer_of(args.case, model, fused),
        data=lambda together: data(args.case, args.steps * together),
        loss=lambda model, x, y: F.cross_entropy(model(x), y),
        judged=64,
    )
    train(args, training)


if __name__ == "__main__":
    main()
