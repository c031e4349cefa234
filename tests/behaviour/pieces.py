"""What random scripts are made of: for each kind of piece the choices, the first of which is the plainest.

A piece fills slots of a script with lines of Python (see `generate`), and says what must become of a script with it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Verdict(enum.Enum):
    """What must become of a script. EITHER: equal to plain torch, or refused, or an end that names a broken promise."""

    EQUAL = "equal"
    EITHER = "equal or refused"
    REFUSED = "refused"


class Need(enum.Enum):
    """Where a piece means the same as in plain torch."""

    SLICE = "one slice in a step: it is not linear in the samples"
    SINGLE = "one slice in a step and one worker: what it keeps from slice to slice is this worker's"
    LOADER = "a loop over a prepared loader"
    ALONE = "a process of its own"
    SYNC = "synchronous mode"
    SEVERAL = "two workers or more"


@dataclass(frozen=True, slots=True)
class Piece:
    """One choice. ``slots``: lines by slot. ``says``: parts of the sentences that refuse it, any of which will do.

    ``without``: kinds that stay plain beside it, and labels of pieces that do not go with it.
    ``tolerance``: how far numbers may be apart, where not as usual.
    """

    kind: str
    name: str
    slots: Mapping[str, str] = field(default_factory=dict)
    verdict: Verdict = Verdict.EQUAL
    says: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    without: tuple[str, ...] = ()
    tolerance: float = 0.0

    @property
    def label(self) -> str:
        """Its name in full."""
        return f"{self.kind}={self.name}"


_EITHER, _REFUSED = Verdict.EITHER, Verdict.REFUSED
_SLICE, _SINGLE, _LOADER, _ALONE, _SYNC, _SEVERAL = (
    Need.SLICE,
    Need.SINGLE,
    Need.LOADER,
    Need.ALONE,
    Need.SYNC,
    Need.SEVERAL,
)

LOOPS = [
    Piece("loop", "epochs"),
    Piece("loop", "range", {"epochs": "range($count)"}),
    Piece(
        "loop",
        "while",
        {
            "loop": """\
batches = iter(loader)
for step in range($count * len(loader)):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    BODY
"""
        },
        needs=(_SINGLE, _LOADER),
        without=("late", "scheduler"),
    ),
    Piece(
        "loop",
        "while, ends in an epoch",
        {
            "loop": """\
batches = iter(loader)
for step in range($count * len(loader) - 1):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    BODY
"""
        },
        needs=(_SINGLE, _LOADER),
        without=("late", "scheduler"),
    ),
    Piece(
        "loop",
        "break",
        {
            "loop": """\
for epoch in ctx.epochs($count):
    for i, (x, y) in enumerate(loader):
        BODY
        if i == 1:
            break
    EPOCH_END
"""
        },
        _EITHER,
        needs=(_SINGLE, _LOADER),
    ),
    Piece(
        "loop",
        "break under range",
        {
            "loop": """\
for epoch in range($count):
    for i, (x, y) in enumerate(loader):
        BODY
        if i == 1:
            break
    EPOCH_END
"""
        },
        needs=(_SINGLE, _LOADER),
    ),
    Piece(
        "loop",
        "islice",
        {
            "imports": "from itertools import islice\n",
            "loop": """\
for epoch in ctx.epochs($count):
    for x, y in islice(loader, 2):
        BODY
    EPOCH_END
""",
        },
        _EITHER,
        needs=(_SINGLE, _LOADER),
    ),
    Piece(
        "loop",
        "break in the last epoch",
        {
            "loop": """\
for epoch in ctx.epochs($count):
    for i, (x, y) in enumerate(loader):
        BODY
        if epoch == $count - 1 and i == 1:
            break
    EPOCH_END
"""
        },
        _EITHER,
        needs=(_SINGLE, _LOADER),
    ),
    Piece(
        "loop",
        "two passes in an epoch",
        {
            "loop": """\
for epoch in ctx.epochs($count):
    for half in range(2):
        for x, y in loader:
            BODY
    EPOCH_END
"""
        },
        _REFUSED,
        ("once in each epoch",),
        needs=(_SINGLE, _LOADER),
        without=("scheduler",),
    ),
    Piece(
        "loop",
        "two range loops",
        {
            "loop": """\
for epoch in range(1):
    for x, y in loader:
        BODY
for epoch in range($count):
    for x, y in loader:
        BODY
    EPOCH_END
"""
        },
        needs=(_LOADER,),
        without=("scheduler",),
    ),
    Piece(
        "loop",
        "no loader",
        {
            "loader": "",
            "loader_name": "",
            "len": "$count",
            "loop": """\
for step in range(2 * $count):
    x, y = default_collate([data[(step * $batch + k) % len(data)] for k in range($batch)])
    BODY
""",
        },
        needs=(_SINGLE,),
        without=("data", "late"),
    ),
    Piece(
        "loop",
        "loader not prepared",
        {"loader": "loader = DataLoader(data, batch_size=$batch)\n", "loader_name": "", "epochs": "range($count)"},
        needs=(_SINGLE,),
        without=("data",),
    ),
]

BODIES = [
    Piece("body", "step and zero_grad"),
    Piece("body", "zero_grad first", {"zero": "", "first": "optimizer.zero_grad()\n"}),
    Piece("body", "zero_grad keeps tensors", {"zero": "optimizer.zero_grad(set_to_none=False)\n"}),
    Piece("body", "zero_grad of the model", {"zero": "model.zero_grad()\n"}),
    Piece(
        "body",
        "closure",
        {
            "forward": """\
def closure():
    optimizer.zero_grad()
    loss = $loss
    loss.backward()
    return loss
""",
            "backward": "",
            "step": "loss = optimizer.step(closure)\n",
        },
        without=("precision",),
    ),
    Piece("body", "no zero_grad", {"zero": ""}, needs=(_SINGLE,)),
    Piece(
        "body",
        "no step on some batches",
        {"first": "n += 1\nif n % 3 == 1:\n    continue\n"},
        _EITHER,
        needs=(_SINGLE, _LOADER),
        without=(
            "model=BatchNorm",
            "model=a buffer that counts",
            "scheduler",
        ),
    ),
    Piece(
        "body",
        "gradient accumulation",
        {
            "first": "n += 1\n",
            "backward": "(loss / 2).backward()\n",
            "step": "if n % 2 == 0:\n    optimizer.step()\n",
            "zero": "    optimizer.zero_grad()\n",
        },
        _EITHER,
        needs=(_SINGLE, _LOADER),
        without=("model=BatchNorm", "model=a buffer that counts", "scheduler", "precision"),
    ),
    Piece(
        "body",
        "step twice",
        {"step": "optimizer.step()\noptimizer.step()\n"},
        _REFUSED,
        ("once into each iteration", "step() twice", "steps twice"),
        needs=(_LOADER,),
        without=("precision", "scheduler"),
    ),
    Piece("body", "step without backward", {"backward": ""}, needs=(_SINGLE,), without=("precision",)),
]

MODELS = [
    Piece("model", "linear", {"build": "model = nn.Linear(4, 2)\n"}),
    Piece("model", "two layers"),
    Piece(
        "model",
        "tied",
        {
            "build": """\
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
model[2].weight = model[0].weight
"""
        },
    ),
    Piece(
        "model",
        "frozen",
        {
            "build": "model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))\n"
            "model[0].weight.requires_grad_(False)\n"
        },
    ),
    Piece(
        "model",
        "left out of the optimizer",
        {"parameters": "list(model.parameters())[1:]"},
        without=("groups",),
    ),
    Piece(
        "model",
        "BatchNorm",
        {
            "build": "model = nn.Sequential(\n"
            "    nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)\n)\n"
        },
        needs=(_SLICE,),
        without=("data=fewer samples than a batch", "data=one sample", "data=a data set of its own"),
    ),
    Piece(
        "model",
        "a parameter that nobody uses",
        {
            "build": "model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))\n"
            "model.register_parameter('unused', nn.Parameter(torch.ones(3)))\n"
        },
    ),
    Piece(
        "model",
        "a parameter of no element",
        {"build": "model = nn.Linear(4, 2)\nmodel.register_parameter('empty', nn.Parameter(torch.ones(0, 3)))\n"},
    ),
    Piece(
        "model",
        "a parameter of no dimension",
        {
            "build": "model = nn.Linear(4, 2)\nmodel.register_parameter('scale', nn.Parameter(torch.ones(())))\n",
            "loss": "F.mse_loss(model(x) * model.scale, y)",
        },
    ),
    Piece(
        "model",
        "transposed",
        {"build": "model = nn.Linear(4, 2)\nmodel.weight = nn.Parameter(torch.ones(4, 2).t())\n"},
    ),
    Piece(
        "model",
        "dropout",
        {"build": "model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 2))\n"},
        needs=(_SINGLE, _LOADER),
    ),
    Piece(
        "model",
        "a buffer that counts",
        {
            "build": "model = nn.Linear(4, 2)\nmodel.register_buffer('calls', torch.zeros((), dtype=torch.long))\n",
            "forward": "model.calls += 1\nloss = $loss\n",
        },
        needs=(_SLICE,),
        without=("body",),
    ),
    Piece(
        "model",
        "counts",
        {
            "data": "data = TensorDataset(torch.arange($samples), torch.zeros($samples))\n",
            "build": """\
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.Parameter(torch.zeros($samples))

    def forward(self, x):
        return self.cells[x].sum()

model = Counts()
""",
            "fill": "",
            "loss": "-model(x)",
            "optimizer": "optimizer = torch.optim.SGD($parameters, lr=1.0)\n",
        },
        needs=(_SLICE,),
        without=(
            "optimizer",
            "groups",
            "flag",
            "state",
            "scheduler",
            "precision",
            "keep",
            "data=one sample",
            "data=collate_fn",
        ),
    ),
    Piece(
        "model",
        "no parameters",
        {
            "build": "model = nn.Tanh()\n",
            "parameters": "[torch.zeros(1, requires_grad=True)]",
            "loss": "model(x).mean()",
        },
        _REFUSED,
        ("no parameters",),
        without=("groups", "state"),
    ),
    Piece(
        "model",
        "meta",
        {"build": "model = nn.Linear(4, 2, device='meta')\n", "fill": ""},
        _REFUSED,
        ("meta",),
        without=("state",),
    ),
    Piece(
        "model",
        "expanded",
        {"build": "model = nn.Linear(4, 2)\nmodel.weight = nn.Parameter(torch.ones(1, 4).expand(2, 4))\n", "fill": ""},
        _REFUSED,
        ("expand", "overlap", "share", "memory"),
        without=("state",),
    ),
    Piece(
        "model",
        "overlapping views",
        {
            "build": """\
model = nn.Linear(4, 2)
flat = torch.ones(10)
model.weight = nn.Parameter(flat[:8].view(2, 4))
model.bias = nn.Parameter(flat[7:9])
"""
        },
        _REFUSED,
        ("overlap", "share", "memory"),
    ),
    Piece(
        "model",
        "no shape yet",
        {"build": "model = nn.LazyLinear(2)\n", "fill": ""},
        _REFUSED,
        ("no shape yet",),
        without=("state", "groups", "optimizer=Adagrad"),
    ),
    Piece(
        "model",
        "a second model",
        {"build": "model = nn.Linear(4, 2)\nsecond = nn.Linear(4, 2)\n", "more": ", second"},
        _REFUSED,
        ("one model", "two models", "2 models", "several models"),
    ),
    Piece(
        "model",
        "a complex parameter",
        {
            "typed": "model = model.to($type)\n"
            "model.register_parameter('z', nn.Parameter(torch.ones(2, dtype=torch.cfloat)))\n"
        },
        _REFUSED,
        ("complex", "not supported"),
        without=("type", "state"),
    ),
]

TYPES = [
    Piece("type", "float64", {"type": "torch.float64"}),
    Piece("type", "float32", {"type": "torch.float32"}, tolerance=2e-4),
    Piece("type", "bfloat16", {"type": "torch.bfloat16"}, needs=(_SINGLE,), tolerance=0.15, without=("precision",)),
]

# The options are drawn: see `generate.hypers`.
OPTIMIZERS = [
    Piece("optimizer", name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
] + [
    Piece(
        "optimizer",
        "LBFGS",
        {"optimizer": "optimizer = torch.optim.LBFGS($parameters, lr=0.1)\n"},
        _REFUSED,
        ("LBFGS", "not supported"),
        without=("groups", "state", "precision", "scheduler", "flag"),
    ),
    Piece(
        "optimizer",
        "a class of its own",
        {"optimizer": "class Mine(torch.optim.SGD):\n    pass\n\noptimizer = Mine($parameters, lr=0.1)\n"},
        _REFUSED,
        ("Mine", "not supported"),
        without=("groups", "state", "flag"),
    ),
    Piece(
        "optimizer",
        "a second optimizer",
        {
            "optimizer": "optimizer = torch.optim.SGD($parameters, lr=0.1)\n"
            "other = torch.optim.SGD($parameters, lr=0.1)\n",
            "more": ", other",
        },
        _REFUSED,
        ("one optimizer", "two optimizers", "2 optimizers", "several optimizers"),
        without=("groups", "flag"),
    ),
    Piece(
        "optimizer",
        "without its model",
        {
            "optimizer": "optimizer = torch.optim.SGD($parameters, lr=0.1)\n",
            "prepare": "optimizer = ctx.prepare(optimizer)\n",
        },
        _REFUSED,
        ("together",),
    ),
]

GROUPS = [
    Piece("groups", "one"),
    Piece(
        "groups",
        "two",
        {
            "parameters": "[{'params': [p for p in model.parameters() if p.dim() < 2], 'lr': 0.02},"
            " {'params': [p for p in model.parameters() if p.dim() > 1], 'weight_decay': 0.03}]"
        },
    ),
    Piece(
        "groups",
        "added after prepare",
        {"after": "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(2))]})\n"},
        _REFUSED,
        ("after ctx.prepare",),
    ),
]

FLAGS = [
    Piece("flag", "none"),
    Piece("flag", "foreach", {"flag": ", foreach=True"}),
    Piece("flag", "not foreach", {"flag": ", foreach=False"}),
    Piece("flag", "maximize", {"flag": ", maximize=True"}),
    Piece(
        "flag", "differentiable", {"flag": ", differentiable=True"}, _REFUSED, ("differentiable",), without=("state",)
    ),
]

STATES = [
    Piece("state", "none"),
    Piece(
        "state",
        "steps before prepare",
        {
            "before": """\
for _ in range(2):
    x, y = default_collate([data[k % len(data)] for k in range(3)])
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
        },
    ),
    Piece(
        "state",
        "loaded before prepare",
        {
            "before": """\
for p in model.parameters():
    p.grad = torch.ones_like(p)
optimizer.step()
saved = copy.deepcopy(optimizer.state_dict())
$again
optimizer.load_state_dict(saved)
optimizer.zero_grad()
"""
        },
    ),
    Piece(
        "state",
        "loaded after prepare",
        {
            "before": """\
for p in model.parameters():
    p.grad = torch.ones_like(p)
optimizer.step()
saved = copy.deepcopy(optimizer.state_dict())
optimizer.zero_grad()
$again
""",
            "after": "optimizer.load_state_dict(saved)\n",
        },
        _EITHER,
        without=("scheduler",),
    ),
    Piece(
        "state",
        "model loaded before prepare",
        {"before": "model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})\n"},
    ),
    Piece(
        "state",
        "model loaded after prepare",
        {"after": "model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})\n"},
        _EITHER,
    ),
    Piece(
        "state",
        "model loaded between epochs",
        {
            "epoch_end": "if epoch == 0 and $count > 1:\n"
            "    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})\n"
        },
        _EITHER,
        needs=(_LOADER,),
    ),
    Piece(
        "state",
        "weights changed once",
        {"late": "if len(seen) == 2:\n    with torch.no_grad():\n        next(model.parameters()).mul_(0.5)\n"},
        _EITHER,
        needs=(_SINGLE,),
    ),
    Piece(
        "state",
        "weights changed through data",
        {"late": "if len(seen) == 2:\n    next(model.parameters()).data.mul_(0.5)\n"},
        _EITHER,
        needs=(_SINGLE,),
    ),
    Piece(
        "state",
        "another tensor for a weight",
        {"late": "if len(seen) == 2:\n    p = next(model.parameters())\n    p.data = p.data * 0.5\n"},
        _EITHER,
        needs=(_SINGLE,),
    ),
    Piece(
        "state",
        "weights clipped in each step",
        {"late": "for p in model.parameters():\n    p.data.clamp_(-0.2, 0.2)\n"},
        _EITHER,
        needs=(_SINGLE,),
    ),
    Piece(
        "state",
        "weights changed before prepare",
        {"before": "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.5)\n"},
    ),
    Piece(
        "state",
        "EMA copied out",
        {
            "after": "average = [p.detach().clone() for p in model.parameters()]\n",
            "late": "for a, p in zip(average, model.parameters(), strict=True):\n    a.lerp_(p.detach(), 0.2)\n",
            "keep": "found['average'] = average\n",
        },
        needs=(_SINGLE,),
    ),
    Piece(
        "state",
        "EMA swapped in and out",
        {
            "after": "average = [p.detach().clone() for p in model.parameters()]\n",
            "late": "for a, p in zip(average, model.parameters(), strict=True):\n    a.lerp_(p.detach(), 0.2)\n",
            "epoch_end": """\
with torch.no_grad():
    own = [p.clone() for p in model.parameters()]
    for a, p in zip(average, model.parameters(), strict=True):
        p.copy_(a)
    model.eval()
    found.setdefault('evaluated', []).append(float(model(data[0][0][None]).sum()))
    model.train()
    for o, p in zip(own, model.parameters(), strict=True):
        p.copy_(o)
""",
        },
        _EITHER,
        needs=(_SINGLE, _LOADER),
    ),
    Piece(
        "state",
        "hyper-parameters changed after prepare",
        {"after": "optimizer.param_groups[0]['lr'] = 0.013\n"},
        without=("scheduler",),
    ),
    Piece(
        "state",
        "lr changed by hand",
        {"late": "optimizer.param_groups[0]['lr'] *= 0.9\n"},
        needs=(_SINGLE,),
        without=("scheduler",),
    ),
    Piece(
        "state",
        "lr changed between epochs",
        {"epoch_end": "optimizer.param_groups[0]['lr'] *= 0.5\n"},
        needs=(_LOADER,),
        without=("scheduler",),
    ),
    Piece(
        "state",
        "hook before the optimizer's step",
        {
            "before": """\
def halve(optimizer, args, kwargs):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)

optimizer.register_step_pre_hook(halve)
"""
        },
        _EITHER,
        without=("precision",),
    ),
    Piece(
        "state",
        "hook after the optimizer's step",
        {
            "before": "optimizer.register_step_post_hook(\n"
            "    lambda o, a, k: found.update(hooked=found.get('hooked', 0) + 1)\n)\n"
        },
        _EITHER,
        needs=(_SINGLE,),
    ),
    Piece(
        "state",
        "hook on gradients",
        {
            "before": "for p in model.parameters():\n"
            "    if p.requires_grad:\n        p.register_hook(lambda g: g * 0.5)\n"
        },
    ),
    Piece(
        "state",
        "hook when gradients are ready",
        {
            "before": """\
def halve(p):
    p.grad.mul_(0.5)

for p in model.parameters():
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(halve)
"""
        },
        without=("body",),
    ),
]

SCHEDULERS = [
    Piece("scheduler", "none"),
    Piece("scheduler", "StepLR", {"scheduler": "StepLR(optimizer, 2, 0.5)", "after_step": "scheduler.step()\n"}),
    Piece(
        "scheduler",
        "CosineAnnealingLR",
        {"scheduler": "CosineAnnealingLR(optimizer, $count * $len)", "after_step": "scheduler.step()\n"},
    ),
    Piece(
        "scheduler",
        "OneCycleLR",
        {
            "scheduler": "OneCycleLR(optimizer, 0.05, total_steps=$count * $len + 1, cycle_momentum=False)",
            "after_step": "scheduler.step()\n",
        },
        needs=(_LOADER,),
    ),
    Piece(
        "scheduler",
        "LambdaLR",
        {"scheduler": "LambdaLR(optimizer, lambda n: 1 / (1 + n))", "after_step": "scheduler.step()\n"},
    ),
    Piece(
        "scheduler",
        "StepLR per epoch",
        {"scheduler": "StepLR(optimizer, 1, 0.5)", "epoch_end": "scheduler.step()\n"},
        needs=(_LOADER,),
    ),
    Piece(
        "scheduler",
        "ReduceLROnPlateau per epoch",
        {"scheduler": "ReduceLROnPlateau(optimizer, patience=0)", "epoch_end": "scheduler.step(1.0)\n"},
        needs=(_LOADER,),
    ),
    Piece(
        "scheduler",
        "StepLR per epoch, not prepared",
        {
            "scheduler": "StepLR(optimizer, 1, 0.5)",
            "epoch_end": "scheduler.step()\n",
            "scheduler_name": "",
        },
        needs=(_LOADER,),
    ),
]

PRECISIONS = [
    Piece("precision", "plain"),
    Piece(
        "precision",
        "clip_grad_norm_",
        {"before_step": "nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n"},
        needs=(_SLICE,),
    ),
    Piece("precision", "ctx.clip_grad_norm", {"before_step": "ctx.clip_grad_norm(0.3)\n"}, needs=(_SYNC,)),
    Piece(
        "precision",
        "clip_grad_value_",
        {"before_step": "nn.utils.clip_grad_value_(model.parameters(), 0.1)\n"},
        needs=(_SLICE,),
    ),
    Piece(
        "precision",
        "GradScaler",
        {
            "after": "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n",
            "backward": "scaler.scale(loss).backward()\n",
            "step": "scaler.step(optimizer)\nscaler.update()\n",
        },
        # torch's own optimizers differ in whether they leave the gradients scaled
        without=("body=no zero_grad",),
    ),
    Piece(
        "precision",
        "GradScaler that overflows",
        {
            "after": "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n",
            "backward": "scaler.scale(loss * (float('inf') if len(seen) == 1 else 1.0)).backward()\n",
            "step": "scaler.step(optimizer)\nscaler.update()\n",
        },
        needs=(_SINGLE,),
        # a step that is skipped leaves buffers as they were
        without=("scheduler", "body=no zero_grad", "model=BatchNorm", "model=a buffer that counts"),
    ),
    Piece(
        "precision",
        "autocast",
        {"forward": "with torch.autocast('cpu', dtype=torch.bfloat16):\n    loss = $loss\n"},
        needs=(_SINGLE,),
        without=("model", "body"),
        tolerance=0.05,
    ),
    Piece(
        "precision",
        "gradients scaled by hand",
        {"before_step": "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)\n"},
        without=("body",),
    ),
]

DATA = [
    Piece("data", "plain"),
    Piece("data", "shuffled", {"options": ", shuffle=True"}),
    Piece("data", "drop_last", {"options": ", shuffle=True, drop_last=True"}),
    Piece("data", "fewer samples than a batch", {"samples": "3"}),
    Piece("data", "one sample", {"samples": "1"}, without=("model",)),
    Piece("data", "a process that loads", {"options": ", shuffle=True, num_workers=1"}, needs=(_SINGLE,)),
    Piece(
        "data",
        "collate_fn",
        {
            "data": "def collate(rows):\n    xs, ys = zip(*rows, strict=True)\n"
            "    return torch.stack(xs) * 0.5, torch.stack(ys)\n\n",
            "options": ", shuffle=True, collate_fn=collate",
        },
    ),
    Piece(
        "data",
        "a data set of its own",
        {
            "data": """\
class Mine(Dataset):
    def __len__(self):
        return $samples - 2

    def __getitem__(self, index):
        return inputs[index] * 2, targets[index]

data = Mine()
""",
            "options": ", shuffle=True",
        },
    ),
    Piece(
        "data",
        "IterableDataset",
        {
            "data": """\
class Stream(IterableDataset):
    def __iter__(self):
        return iter([(inputs[k], targets[k]) for k in range($samples)])

rows, data = data, Stream()
"""
        },
        _REFUSED,
        ("IterableDataset",),
        without=("state",),
    ),
    Piece(
        "data",
        "WeightedRandomSampler",
        {"options": ", sampler=WeightedRandomSampler([1.0] * $samples, $samples)"},
        _REFUSED,
        ("WeightedRandomSampler",),
    ),
    Piece(
        "data",
        "SubsetRandomSampler",
        {"options": ", sampler=SubsetRandomSampler(range(4))"},
        _REFUSED,
        ("SubsetRandomSampler",),
    ),
    Piece(
        "data",
        "drawn with replacement",
        {"options": ", sampler=RandomSampler(data, replacement=True)"},
        _REFUSED,
        ("RandomSampler",),
    ),
    Piece(
        "data",
        "drawn a number of times",
        {"options": ", sampler=RandomSampler(data, num_samples=5)"},
        _REFUSED,
        ("num_samples",),
    ),
    Piece(
        "data",
        "batch_sampler",
        {"loader": "loader = DataLoader(data, batch_sampler=[[0, 1], [2]])\n"},
        _REFUSED,
        ("batch_size", "batch_sampler"),
    ),
    Piece(
        "data", "no batch size", {"loader": "loader = DataLoader(data, batch_size=None)\n"}, _REFUSED, ("batch_size",)
    ),
    Piece("data", "empty", {"samples": "0"}, _REFUSED, ("empty",), without=("state",)),
    Piece(
        "data",
        "nothing is left",
        {"samples": "1", "options": ", drop_last=True"},
        _REFUSED,
        ("no slice",),
    ),
    Piece(
        "data",
        "two loaders",
        {"after": "loader = ctx.prepare(DataLoader(data, batch_size=2))\n"},
        _REFUSED,
        ("loader already",),
    ),
]

KEEPS = [
    Piece("keep", "weights"),
    Piece(
        "keep",
        "optimizer.state_dict()",
        {"keep": "found['optimizer'] = optimizer.state_dict()\n"},
        without=("model=a parameter of no element",),  # it has no state on the servers, and needs none
    ),
    Piece(
        "keep",
        "evaluation between epochs",
        {
            "epoch_end": "model.eval()\nwith torch.no_grad():\n"
            "    found.setdefault('scores', []).append(float(model(data[0][0][None]).sum()))\n"
            "model.train()\n"
        },
        needs=(_LOADER,),
    ),
    Piece(
        "keep",
        "weights between epochs",
        {"epoch_end": "found[f'epoch {epoch}'] = {k: v.clone() for k, v in model.state_dict().items()}\n"},
        needs=(_LOADER,),
    ),
    Piece(
        "keep",
        "learning rates",
        {"late": "found.setdefault('lr', []).append(optimizer.param_groups[0]['lr'])\n"},
        needs=(_SINGLE,),
    ),
]

ENDS = [
    Piece("end", "close"),
    Piece("end", "no close", {"end": ""}),
    Piece("end", "close twice", {"end": "ctx.close()\nctx.close()\n"}),
    Piece("end", "sys.exit(0) at the end", {"end": "sys.exit(0)\n"}),
    Piece("end", "sys.exit(3) at the end", {"end": "sys.exit(3)\n"}, needs=(_ALONE,)),
    Piece(
        "end",
        "sys.exit(0) in the middle",
        {"late": "if len(seen) == 3:\n    sys.exit(0)\n"},
        needs=(_SINGLE,),
        without=("keep",),
    ),
    Piece(
        "end",
        "sys.exit(3) in the middle",
        {"late": "if len(seen) == 3:\n    sys.exit(3)\n"},
        needs=(_SINGLE, _ALONE),
        without=("keep",),
    ),
    Piece(
        "end",
        "an exception in the middle",
        {"late": "if len(seen) == 3:\n    raise RuntimeError('the cat')\n"},
        needs=(_SINGLE, _ALONE),
        without=("keep",),
    ),
    Piece(
        "end",
        "an exception after prepare",
        {"after": "raise RuntimeError('the cat')\n"},
        needs=(_ALONE,),
        without=("keep", "body"),
    ),
    Piece(
        "end",
        "step after the loop",
        {"end": "optimizer.step()\nctx.close()\n"},
        _REFUSED,
        ("iteration over the prepared loader", "loop"),
        needs=(_LOADER,),
    ),
    Piece(
        "end",
        "step after close",
        {"end": "ctx.close()\noptimizer.step()\n"},
        _REFUSED,
        ("closed", "iteration"),
        needs=(_LOADER,),
    ),
]

FAULTS = [
    Piece("fault", "none"),
    Piece(
        "fault",
        "a worker leaves early",
        {"late": "if ctx.rank == 1 and len(seen) == 2:\n    sys.exit(0)\n"},
        needs=(_SEVERAL, _LOADER),
    ),
    Piece(
        "fault",
        "a worker is killed",
        {
            "before_step": """\
if ctx.rank == 1 and len(seen) == 2 and not os.path.exists(os.environ["FOUND"] + "-killed"):
    open(os.environ["FOUND"] + "-killed", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
        },
        needs=(_SEVERAL, _LOADER),
    ),
]

_ALL = (
    *(LOOPS, BODIES, MODELS, TYPES, OPTIMIZERS, GROUPS, FLAGS, STATES, SCHEDULERS, PRECISIONS, DATA, KEEPS, ENDS),
    FAULTS,
)
KINDS: dict[str, list[Piece]] = {pieces[0].kind: pieces for pieces in _ALL}


def piece(label: str) -> Piece:
    """The piece of this label. Raises KeyError if there is none."""
    kind, _, name = label.partition("=")
    return {p.name: p for p in KINDS[kind]}[name]
