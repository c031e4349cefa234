"""The loop of a random script and its body, how it ends, and who dies. The first piece of each kind is the plainest."""

from __future__ import annotations

from tests.support.pieces.base import Need, Piece, Verdict

LOOPS: list[Piece] = [
    Piece("loop", "epochs"),
    Piece("loop", "range", {"epochs": "range($count)"}),
    Piece("loop", "epochs from a later one", {"epochs": "ctx.epochs($count + 2, start=2)"}, needs=(Need.LOADER,)),
    Piece(
        "loop",
        "range from a later epoch",
        {
            "loop": """\
for epoch in range(2, 2 + $count):
    loader.set_epoch(epoch)
    for x, y in loader:
        BODY
    EPOCH_END
"""
        },
        needs=(Need.LOADER,),
    ),
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
        needs=(Need.SINGLE, Need.LOADER),
        without=("scheduler",),
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
        needs=(Need.SINGLE, Need.LOADER),
        without=("scheduler",),
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
        needs=(Need.SINGLE, Need.LOADER),
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
        needs=(Need.SINGLE, Need.LOADER),
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
        needs=(Need.SINGLE, Need.LOADER),
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
        needs=(Need.SINGLE, Need.LOADER),
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
        Verdict.REFUSED,
        ("once in each epoch",),
        needs=(Need.SINGLE, Need.LOADER),
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
        needs=(Need.LOADER,),
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
        needs=(Need.SINGLE,),
        without=("data",),
    ),
    Piece(
        "loop",
        "draws its batches",
        {
            "loader": "",
            "loader_name": "",
            "len": "2",
            "loop": """\
for step in range(2 * $count):
    rows = torch.randint(len(data), ($batch,))
    x, y = default_collate([data[int(k)] for k in rows])
    BODY
""",
        },
        needs=(Need.SINGLE, Need.SYNC),
        # a step that is skipped is a slice all the same
        without=("data", "precision=GradScaler that overflows"),
    ),
    Piece(
        "loop",
        "draws its batches with a generator",
        {
            "loader": "",
            "loader_name": "",
            "len": "2",
            "loop": """\
generator = torch.Generator()
for step in range(2 * $count):
    generator.manual_seed(ctx.slice_seed())
    rows = torch.randint(len(data), ($batch,), generator=generator)
    x, y = default_collate([data[int(k)] for k in rows])
    BODY
""",
        },
        needs=(Need.SINGLE, Need.SYNC),
        # a step that is skipped is a slice all the same
        without=("data", "precision=GradScaler that overflows"),
    ),
    Piece(
        "loop",
        "loader not prepared",
        {"loader": "loader = DataLoader(data, batch_size=$batch)\n", "loader_name": "", "epochs": "range($count)"},
        needs=(Need.SINGLE,),
        without=("data",),
    ),
]

BODIES: list[Piece] = [
    Piece("body", "step and zero_grad"),
    Piece(
        "body",
        "changes the batch in its place",
        {"first": "x.mul_(0.5)\n"},
        needs=(Need.LOADER,),
        without=("model=counts",),  # its samples are whole numbers
    ),
    Piece("body", "zero_grad first", {"zero": "", "first": "optimizer.zero_grad()\n"}),
    Piece("body", "zero_grad keeps tensors", {"zero": "optimizer.zero_grad(set_to_none=False)\n"}),
    Piece("body", "zero_grad first, keeps tensors", {"zero": "", "first": "optimizer.zero_grad(set_to_none=False)\n"}),
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
    # refused at the second slice of a worker
    # Where many workers share few slices, each may compute one only: then none has a gradient of an earlier slice, and
    # the script trains as if it cleared them.
    Piece("body", "no zero_grad", {"zero": ""}, Verdict.EITHER, without=("model=counts",)),
    Piece(
        "body",
        "zero_grad on every third batch",
        {"zero": "n += 1\nif n % 3 == 0:\n    optimizer.zero_grad()\n"},
        Verdict.EITHER,
        without=("model=counts",),
    ),
    Piece(
        "body",
        "no step on some batches",
        {"first": "n += 1\nif n % 3 == 1:\n    continue\n"},
        Verdict.EITHER,
        needs=(Need.SINGLE, Need.LOADER),
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
            "given": ", accumulate=2",
            "backward": "(loss / 2).backward()\n",
            "step": "if ctx.step_due:\n    optimizer.step()\n",
            "zero": "    optimizer.zero_grad()\n",
        },
        needs=(Need.SINGLE, Need.LOADER),
        without=("scheduler", "precision"),
    ),
    Piece(
        "body",
        "step twice",
        {"step": "optimizer.step()\noptimizer.step()\n"},
        Verdict.REFUSED,
        ("once into each iteration", "step() twice", "steps twice"),
        needs=(Need.LOADER,),
        without=("precision", "scheduler"),
    ),
    Piece("body", "step without backward", {"backward": ""}, needs=(Need.SINGLE,), without=("precision",)),
]

ENDS: list[Piece] = [
    Piece("end", "close"),
    Piece("end", "no close", {"end": ""}),
    Piece("end", "close twice", {"end": "ctx.close()\nctx.close()\n"}),
    Piece("end", "sys.exit(0) at the end", {"end": "sys.exit(0)\n"}),
    Piece("end", "sys.exit(3) at the end", {"end": "sys.exit(3)\n"}, needs=(Need.ALONE,)),
    Piece(
        "end",
        "sys.exit(0) in the middle",
        {"late": "if len(seen) == 3:\n    sys.exit(0)\n"},
        needs=(Need.SINGLE,),
        without=("keep",),
    ),
    Piece(
        "end",
        "sys.exit(3) in the middle",
        {"late": "if len(seen) == 3:\n    sys.exit(3)\n"},
        needs=(Need.SINGLE, Need.ALONE),
        without=("keep",),
    ),
    Piece(
        "end",
        "an exception in the middle",
        {"late": "if len(seen) == 3:\n    raise RuntimeError('the cat')\n"},
        needs=(Need.SINGLE, Need.ALONE),
        without=("keep",),
    ),
    Piece(
        "end",
        "an exception after prepare",
        {"after": "raise RuntimeError('the cat')\n"},
        needs=(Need.ALONE,),
        without=("keep", "body"),
    ),
    Piece(
        "end",
        "step after the loop",
        {"end": "optimizer.step()\nctx.close()\n"},
        Verdict.REFUSED,
        ("iteration over the prepared loader", "loop"),
        needs=(Need.LOADER,),
    ),
    Piece(
        "end",
        "step after close",
        {"end": "ctx.close()\noptimizer.step()\n"},
        Verdict.REFUSED,
        ("closed", "iteration"),
        needs=(Need.LOADER,),
    ),
]

FAULTS: list[Piece] = [
    Piece("fault", "none"),
    Piece(
        "fault",
        "a worker leaves early",
        {"late": "if ctx.rank == 1 and len(seen) == 2:\n    sys.exit(0)\n"},
        needs=(Need.SEVERAL, Need.LOADER),
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
        needs=(Need.SEVERAL, Need.LOADER),
    ),
]
