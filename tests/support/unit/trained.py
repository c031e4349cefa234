"""A model that torch has trained, saved as servers save it: for tests of what others can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from google.protobuf import json_format
from torch import nn

from paramserver.checkpoint.catalog import write_manifest
from paramserver.checkpoint.manifest import Manifest, checkpoint_name
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.tensorfile import Entry, write_tensors
from paramserver.core.layout.hypers import RULES
from paramserver.tensors.dtypes import buffer_of, dtype_name
from paramserver.worker.script.binding import ModelBinding
from tests.support.unit.checkpoints import digest, facts, manifest

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.5),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "adadelta": lambda groups: torch.optim.Adadelta(groups),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.01, t0=1),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}


class Net(nn.Module):
    """Tied weights, buffers of several types, one that is not saved, a frozen and a bfloat16 parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5)
        self.shift = nn.Parameter(torch.randn(5).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.embed(x))) * self.mask * self.scale + self.shift.float()
        out: torch.Tensor = self.head(hidden)
        return out


def make(optimizer: str) -> tuple[Net, torch.optim.Optimizer]:
    """A new model and its optimizer, with two parameter groups."""
    torch.manual_seed(0)
    model = Net()
    first = [model.embed.weight, *model.norm.parameters()]
    return model, OPTIMIZERS[optimizer]([{"params": first}, {"params": [model.shift, model.scale], "lr": 0.005}])


def train(model: Net, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """The same numbers for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randint(0, 7, (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(x), x)
        torch.autograd.backward(loss)
        optimizer.step()


def save(place: Place, model: Net, optimizer: torch.optim.Optimizer, version: int = 50, **others: Any) -> Manifest:
    """Two servers: tensors in turn, and each tensor's optimizer state cut in two, a piece on each server."""
    binding = ModelBinding(model, [optimizer])
    spec = binding.message(0)
    tensors = {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    states: list[list[tuple[Entry, torch.Tensor]]] = [[], []]
    weights: list[list[tuple[Entry, torch.Tensor]]] = [[], []]
    parameters = dict(model.named_parameters())
    for number, tensor in enumerate(spec.tensors):
        value = tensors[tensor.name]
        value = value.float() if value.dtype is torch.bfloat16 else value
        entry = Entry(tensor.name, dtype_name(value.dtype), tuple(value.shape))
        weights[number % 2].append((entry, value))
        for key, state in optimizer.state.get(parameters.get(tensor.name, torch.empty(0)), {}).items():
            name = f"optimizer/{tensor.name}/{key}"
            if state is None:
                continue
            if key in RULES[spec.optimizer.name].scalars:
                one = torch.as_tensor(state, dtype=torch.float32).reshape(1)
                for server in range(2):
                    states[server].append((Entry(name, "float32", (1,)), one))
                continue
            flat = state.float().reshape(-1).contiguous()
            cut = flat.numel() // 2
            if not cut:
                states[1].append((Entry(name, "float32", tuple(state.shape)), flat))
                continue
            states[1].append((Entry(f"{name}@0", "float32", (cut,)), flat[:cut]))
            states[0].append((Entry(f"{name}@{cut}", "float32", (flat.numel() - cut,)), flat[cut:].clone()))
    where = checkpoint_name(version, 1)
    infos = []
    for kind, parts in (("model", weights), ("optimizer", states)):
        for server, part in enumerate(parts):
            data = [buffer_of(value.contiguous()) for _, value in part]
            name = f"{kind}-{server + 1:05d}-of-00002.safetensors"
            metadata = facts(version) if kind == "optimizer" else {}
            infos.append(write_tensors(place, where, name, [entry for entry, _ in part], data, metadata, version))
    described = json.loads(json_format.MessageToJson(spec, preserving_proto_field_name=True))
    made = manifest(infos[:2], infos[2:], version, model=described, layout_digest=digest(described), **others)
    write_manifest(place, made)
    return made
