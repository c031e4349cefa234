"""Train a GPT-style language model on bytes: the sources of Python's standard library, or any text.

python workers/charlm.py                                                  alone, in one process
paramserver run workers/charlm.py --servers 2 --workers 2                 on a cluster on this machine
paramserver run workers/charlm.py -- --size 10m --text book.txt           a larger model on another text
paramserver run workers/charlm.py -- --muon                               Muon for the matrices of the blocks
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import paramserver as ps

# By name: width, layers, heads. A model has about 12 × layers × width² parameters.
SIZES = {
    "0.5m": (128, 2, 4),
    "3m": (256, 4, 4),
    "10m": (384, 6, 6),
    "30m": (512, 10, 8),
    "100m": (768, 14, 12),
}
BYTES = 256
# Directories of the standard library that hold no sources of it, or only tests.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Block(nn.Module):
    """Attention, then two linear layers, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.outputs = nn.Linear(width, width, bias=False)
        self.before_layers = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inputs(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outputs(seen.transpose(1, 2).reshape(batch, length, width))
        further: Tensor = self.layers(self.before_layers(x))
        return x + further


class CharLM(nn.Module):
    """Takes (batch, length) bytes as numbers, gives (batch, length, 256) scores for the byte after each.

    ``context``: the largest length. The scores come from the same matrix as the embedding.
    """

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # what is added to the shortcuts begins smaller
                last = name.endswith(("outputs.weight", "layers.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text that lie one behind the other: ``context`` bytes, and the byte after each of them."""

    def __init__(self, text: bytes, context: int) -> None:
        """Raises ValueError if the text is shorter than one piece."""
        if len(text) <= context:
            raise ValueError(f"a text of {len(text)} bytes is too short for pieces of {context}: give a longer one")
        self._text, self._context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._context
        piece = self._text[start : start + self._context + 1].long()
        return piece[:-1], piece[1:]


def standard_library() -> bytes:
    """The sources of Python's standard library without its tests, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in sorted(root.rglob("*.py")) if not _LEFT_OUT & {*path.relative_to(root).parts})
    return b"\n".join(path.read_bytes() for path in files)


def groups(parameters: Iterable[nn.Parameter], decay: float) -> list[dict[str, object]]:
    """Parameter groups: weight decay for matrices only."""
    every = list(parameters)
    matrices = [parameter for parameter in every if parameter.dim() > 1]
    others = [parameter for parameter in every if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def optimizers_of(model: CharLM, lr: float, decay: float, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters; with ``muon``: Muon for the matrices of the blocks, and AdamW for the others."""
    hidden = [parameter for parameter in model.blocks.parameters() if parameter.dim() > 1] if muon else []
    mine = {id(parameter) for parameter in hidden}
    rest = groups([parameter for parameter in model.parameters() if id(parameter) not in mine], decay)
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95))]
    if muon:  # its updates are scaled so that the learning rate and the decay of AdamW fit
        made.append(torch.optim.Muon(hidden, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return made


def warm_up_and_cosine(warm_up: int, steps: int) -> Callable[[int], float]:
    """The learning rate of each step as a part of the largest: up in a line, then down to a tenth as a cosine."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))

    return factor


def loss_of(model: nn.Module, x: Tensor, y: Tensor, bf16: bool) -> Tensor:
    """The mean loss for each byte, in nats."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=bf16):
        scores = model(x)
    return F.cross_entropy(scores.float().flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model: nn.Module, data: Dataset[tuple[Tensor, Tensor]], device: torch.device, bf16: bool) -> float:
    """The mean loss over all pieces."""
    model.eval()
    losses = [loss_of(model, x.to(device), y.to(device), bf16) for x, y in DataLoader(data, batch_size=16)]
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def sample(model: CharLM, length: int, device: torch.device, begin: str = "def ", seed: int = 0) -> str:
    """``begin`` and ``length`` bytes that the model draws, one after the other."""
    model.eval()
    numbers = torch.Generator().manual_seed(seed)
    text = torch.tensor([[*begin.encode()]], device=device)
    for _ in range(length):
        scores = model(text[:, -model.context :])[0, -1].float() / 0.8
        drawn = torch.multinomial(scores.softmax(0).cpu(), 1, generator=numbers)
        text = torch.cat([text, drawn.to(device)[None]], dim=1)
    model.train()
    return bytes(text[0].tolist()).decode(errors="replace")


def evenly(data: Windows, start: int, stop: int, most: int) -> Subset[tuple[Tensor, Tensor]]:
    """At most so many pieces out of a range, the same distance apart; 0: all of them."""
    step = max(1, (stop - start) // most) if most else 1
    return Subset(data, range(start, stop, step)[: most or None])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5m", help="about how many parameters the model has")
    parser.add_argument("--text", type=Path, help="a file to learn from, instead of the standard library")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text in a batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches whose gradients are added up before a step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pieces", type=int, default=4096, help="pieces of text in an epoch; 0: all of the text")
    parser.add_argument("--lr", type=float, default=2e-3, help="the largest learning rate")
    parser.add_argument("--warm-up", type=int, default=20, help="steps until the learning rate is largest")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--muon", action="store_true", help="train the matrices of the blocks with Muon")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of a step's gradient")
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, help="compute in bfloat16 (default: on a GPU only)"
    )
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--sample", type=int, default=300, help="bytes to draw from the model at the end")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ctx = ps.init()
    text = args.text.read_bytes() if args.text is not None else standard_library()
    data = Windows(text, args.context)
    cut = len(data) * 9 // 10  # the last tenth is to validate
    train, validation = evenly(data, 0, cut, args.pieces), evenly(data, cut, len(data), 64)
    model = CharLM(*SIZES[args.size], args.context)
    loader = ctx.prepare(DataLoader(train, batch_size=args.batch_size, shuffle=True), accumulate=args.accumulate)
    optimizers = optimizers_of(model, args.lr, args.weight_decay, args.muon)
    schedule = warm_up_and_cosine(args.warm_up, args.epochs * -(-len(loader) // args.accumulate))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) for optimizer in optimizers]
    model, *stepped = ctx.prepare(model, *optimizers, *schedulers)
    bf16 = ctx.device.type == "cuda" if args.bf16 is None else args.bf16
    run: nn.Module = torch.compile(model) if args.compile else model

    for epoch in ctx.epochs(args.epochs):
        for x, y in loader:
            loss = loss_of(run, x, y, bf16)
            (loss / args.accumulate).backward()
            ctx.log(loss=loss)
            if not ctx.step_due:
                continue
            ctx.clip_grad_norm(args.clip)
            for one in stepped:  # the optimizers, then their schedulers
                one.step()
            model.zero_grad()
        if ctx.is_main:
            found = validate(model, validation, ctx.device, bf16)
            ctx.log(validation_loss=found)
            print(f"epoch {epoch + 1}: validation loss {found:.3f} nats per byte", flush=True)
    if ctx.is_main and args.sample:
        print(sample(model, args.sample, ctx.device), flush=True)
    ctx.close()


if __name__ == "__main__":
    main()
