"""Models and their types. The first piece of each kind is the plainest."""

from __future__ import annotations

from tests.support.pieces.base import Need, Piece, Verdict

MODELS: list[Piece] = [
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
        # servers keep, and save, such a parameter as it was given to them; a warning says so
        without=(
            "groups",
            *("state=weights changed once", "state=weights changed through data", "state=another tensor for a weight"),
            "state=weights clipped in each step",
        ),
    ),
    Piece(
        "model",
        "BatchNorm",
        {
            "build": "model = nn.Sequential(\n"
            "    nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)\n)\n"
        },
        needs=(Need.SLICE,),
        without=("data=fewer samples than a batch", "data=one sample", "data=a data set of its own"),
    ),
    Piece(
        "model",
        "a layer that few slices use",
        {
            "build": """\
class Rare(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        hidden, rows = self.first(x), (x[:, 0] > 1).nonzero()[:, 0]
        if len(rows):
            hidden = hidden.index_add(0, rows, self.rare(hidden[rows]))
        return self.last(hidden)

model = Rare()
"""
        },
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
        needs=(Need.SINGLE, Need.LOADER),
    ),
    Piece(
        "model",
        "noise of a generator of its own",
        {
            "build": """\
class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = random.Random(5)

    def forward(self, x):
        return x * (0.5 + self.own.random()) if self.training else x

model = nn.Sequential(Noise(), nn.Linear(4, 2))
"""
        },
        needs=(Need.SLICE, Need.LOADER),
    ),
    Piece(
        "model",
        "a buffer that counts",
        {
            "build": "model = nn.Linear(4, 2)\nmodel.register_buffer('calls', torch.zeros((), dtype=torch.long))\n",
            "forward": "model.calls += 1\nloss = $loss\n",
        },
        needs=(Need.SLICE,),
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
        needs=(Need.SLICE,),
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
        Verdict.REFUSED,
        ("no parameters",),
        without=("groups", "state"),
    ),
    Piece(
        "model",
        "meta",
        {"build": "model = nn.Linear(4, 2, device='meta')\n", "fill": ""},
        Verdict.REFUSED,
        ("meta",),
        without=("state",),
    ),
    Piece(
        "model",
        "expanded",
        {
            "build": "model = nn.Linear(4, 2)\n",
            "typed": "model = model.to($type)\n"
            "model.weight = nn.Parameter(torch.ones(1, 4, dtype=$type).expand(2, 4))\n",
        },
        Verdict.REFUSED,
        ("expand", "overlap", "share", "memory"),
        without=("state",),
    ),
    Piece(
        "model",
        "overlapping views",
        {
            "build": "model = nn.Linear(4, 2)\n",
            "typed": """\
flat = torch.ones(10, dtype=$type)
model.weight = nn.Parameter(flat[:8].view(2, 4))
model.bias = nn.Parameter(flat[7:9])
""",
        },
        Verdict.REFUSED,
        ("overlap", "share", "memory"),
    ),
    Piece(
        "model",
        "no shape yet",
        {"build": "model = nn.LazyLinear(2)\n", "fill": ""},
        Verdict.REFUSED,
        ("no shape yet",),
        without=("state", "groups", "optimizer=Adagrad"),
    ),
    Piece(
        "model",
        "a second model",
        {"build": "model = nn.Linear(4, 2)\nsecond = nn.Linear(4, 2)\n", "more": ", second"},
        Verdict.REFUSED,
        ("one model", "two models", "2 models", "several models"),
    ),
    Piece(
        "model",
        "a complex parameter",
        {
            "typed": "model = model.to($type)\n"
            "model.register_parameter('z', nn.Parameter(torch.ones(2, dtype=torch.cfloat)))\n"
        },
        Verdict.REFUSED,
        ("complex", "not supported"),
        without=("type", "state"),
    ),
]

TYPES: list[Piece] = [
    Piece("type", "float64", {"type": "torch.float64"}),
    Piece("type", "float32", {"type": "torch.float32"}, tolerance=2e-4),
    Piece(
        "type",
        "bfloat16",
        {"type": "torch.bfloat16"},
        needs=(Need.SINGLE,),
        tolerance=0.15,
        without=("precision", "model=BatchNorm"),
    ),
]
