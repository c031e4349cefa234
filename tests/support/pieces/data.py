"""Data sets and loaders. The first piece of each kind is the plainest."""

from __future__ import annotations

from tests.support.pieces.base import Need, Piece, Verdict

GENERATOR = "generator=torch.Generator()"

DATA: list[Piece] = [
    Piece("data", "plain"),
    Piece("data", "shuffled", {"options": ", shuffle=True"}),
    Piece("data", "drop_last", {"options": ", shuffle=True, drop_last=True"}),
    Piece("data", "fewer samples than a batch", {"samples": "3"}),
    Piece("data", "one sample", {"samples": "1"}, without=("model",)),
    Piece("data", "a process that loads", {"options": ", shuffle=True, num_workers=1"}, needs=(Need.SINGLE,)),
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
        Verdict.REFUSED,
        ("IterableDataset",),
        without=("state",),
    ),
    Piece(
        "data",
        "a generator of its own",
        {
            "data": """\
class Noisy(Dataset):
    def __init__(self):
        self.own = random.Random(5)

    def __len__(self):
        return $samples

    def __getitem__(self, index):
        return inputs[index] * self.own.random(), targets[index]

data = Noisy()
""",
            "options": ", shuffle=True",
        },
        needs=(Need.SLICE, Need.LOADER),
        without=("state",),
    ),
    Piece(
        "data",
        "collate_fn with a generator of its own",
        {
            "data": """\
def collate_with(generator):
    def collate(rows):
        x, y = default_collate(rows)
        return x * generator.random(), y

    collate.own = generator
    return collate

""",
            "options": ", collate_fn=collate_with(random.Random(5))",
        },
        needs=(Need.SLICE, Need.LOADER),
    ),
    Piece(
        "data",
        "another collate_fn after the first epoch",
        {
            "data": "def halved(rows):\n    x, y = default_collate(rows)\n    return x * 0.5, y\n\n",
            "epoch_end": "loader.collate_fn = halved\n",
        },
        needs=(Need.LOADER,),
        without=("loop=two range loops",),
    ),
    Piece(
        "data",
        "the data set is replaced",
        {
            "after": "try:\n    loader.dataset = data\n"
            "except ValueError as error:\n    found['refused'] = str(error)\n",
        },
        needs=(Need.LOADER,),
    ),
    Piece(
        "data",
        "another batch size after prepare",
        {"after": "loader.batch_sampler.batch_size += 1\n"},
        Verdict.REFUSED,
        ("a job keeps its slices",),
        needs=(Need.LOADER,),
    ),
    Piece(
        "data",
        "more samples after prepare",
        {"after": "data.tensors = tuple(torch.cat([one, one]) for one in data.tensors)\n"},
        Verdict.REFUSED,
        ("a job keeps its slices",),
        needs=(Need.LOADER,),
    ),
    Piece(
        "data",
        "another order on each worker",
        {"data": "data = Subset(data, [(k + ctx.rank) % $samples for k in range($samples)])\n"},
        Verdict.REFUSED,
        ("is another one here",),
        needs=(Need.SEVERAL, Need.LOADER),
        without=("state",),  # a state that the script computes of its data differs as well, and is refused first
    ),
    Piece(
        "data",
        "a stream",
        {
            "data": """\
class Stream(IterableDataset):
    def __len__(self):
        return $samples

    def __iter__(self):
        return iter([(inputs[k], targets[k]) for k in range($samples)])

rows, data = data, Stream()
"""
        },
        without=("state", "keep=evaluation between epochs"),
    ),
    Piece(
        "data",
        "samples as they are",
        {
            "data": "def as_it_is(rows):\n    return rows[0]\n\n",
            "loader": "loader = DataLoader(data, batch_size=1, shuffle=True, collate_fn=as_it_is)\n",
        },
        needs=(Need.SINGLE,),
        without=("model", "body=gradient accumulation"),
    ),
    # Workers of a test may be threads, so samplers draw from a generator of their own. Batches may have one sample.
    Piece(
        "data",
        "WeightedRandomSampler",
        {"options": f", sampler=WeightedRandomSampler([1.0 + k % 2 for k in range($samples)], $samples, {GENERATOR})"},
        without=("model",),
    ),
    Piece(
        "data",
        "SubsetRandomSampler",
        {"options": f", sampler=SubsetRandomSampler(range(4), {GENERATOR})"},
        without=("model",),
    ),
    Piece(
        "data",
        "drawn with replacement",
        {"options": f", sampler=RandomSampler(data, replacement=True, {GENERATOR})"},
        without=("model",),
    ),
    Piece(
        "data",
        "drawn a number of times",
        {"options": f", sampler=RandomSampler(data, num_samples=5, {GENERATOR})"},
        without=("model",),
    ),
    Piece(
        "data",
        "epochs of different length",
        {
            "data": """\
class Shrinking(Sampler):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return $samples

    def __iter__(self):
        return iter(range(self.epoch * 5, $samples))

""",
            "options": ", sampler=Shrinking()",
        },
        without=("model",),
    ),
    Piece(
        "data",
        "batch_sampler",
        {"loader": "loader = DataLoader(data, batch_sampler=[[0, 1], [2], [0, 3, 2]])\n"},
        without=("model",),
    ),
    Piece(
        "data",
        "no length",
        {"options": ", sampler=iter(range(4))"},
        Verdict.REFUSED,
        ("has no length",),
    ),
    Piece("data", "empty", {"samples": "0"}, Verdict.REFUSED, ("empty",), without=("state",)),
    Piece(
        "data",
        "nothing is left",
        {"samples": "1", "options": ", drop_last=True"},
        Verdict.REFUSED,
        ("no slice",),
    ),
    Piece(
        "data",
        "two loaders",
        {"after": "loader = ctx.prepare(DataLoader(data, batch_size=2))\n"},
        Verdict.REFUSED,
        ("loader already",),
    ),
]
