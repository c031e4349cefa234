"""Optimizers, schedules, precision and clipping. The first piece of each kind is the plainest."""

from __future__ import annotations

from tests.support.pieces.base import Need, Piece, Verdict

# The options are drawn: see `generate.hypers`.
OPTIMIZERS: list[Piece] = [
    Piece("optimizer", name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
] + [
    Piece(
        "optimizer",
        "SGD and AdamW",
        {
            "optimizer": "parameters = list(model.parameters())\n"
            "optimizer = torch.optim.SGD(parameters[1:], lr=0.05, momentum=0.9)\n"
            "other = torch.optim.AdamW(parameters[:1], lr=0.02)\n",
            "prepare": "model, optimizer, loader, other = ctx.prepare(model, optimizer, loader, other)\n",
            "before_step": "other.step()\nother.zero_grad()\n",
        },
        needs=(Need.LOADER,),
        without=(
            "groups",
            "flag",
            "state",
            "scheduler",
            "precision",
            "body",
            "model=no parameters",
            "model=a second model",
        ),
    ),
    Piece(
        "optimizer",
        "LBFGS",
        {"optimizer": "optimizer = torch.optim.LBFGS($parameters, lr=0.1)\n"},
        Verdict.REFUSED,
        ("LBFGS", "not supported"),
        without=("groups", "state", "precision", "scheduler", "flag"),
    ),
    Piece(
        "optimizer",
        "a class of its own",
        {"optimizer": "class Mine(torch.optim.SGD):\n    pass\n\noptimizer = Mine($parameters, lr=0.1)\n"},
        Verdict.REFUSED,
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
        Verdict.REFUSED,
        ("optimizers have", "twice"),
        without=("groups", "flag"),
    ),
    Piece(
        "optimizer",
        "without its model",
        {
            "optimizer": "optimizer = torch.optim.SGD($parameters, lr=0.1)\n",
            "prepare": "optimizer = ctx.prepare(optimizer)\n",
        },
        Verdict.REFUSED,
        ("together",),
    ),
]

GROUPS: list[Piece] = [
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
        Verdict.REFUSED,
        ("added after ctx.prepare", "no group can be added", "between two epochs", "needs the loop"),
    ),
]

FLAGS: list[Piece] = [
    Piece("flag", "none"),
    Piece("flag", "foreach", {"flag": ", foreach=True"}),
    Piece("flag", "not foreach", {"flag": ", foreach=False"}),
    Piece("flag", "maximize", {"flag": ", maximize=True"}),
    Piece(
        "flag",
        "differentiable",
        {"flag": ", differentiable=True"},
        Verdict.REFUSED,
        ("differentiable",),
        without=("state",),
    ),
]

SCHEDULERS: list[Piece] = [
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
        needs=(Need.LOADER,),
    ),
    Piece(
        "scheduler",
        "LambdaLR",
        {"scheduler": "LambdaLR(optimizer, lambda n: 1 / (1 + n))", "after_step": "scheduler.step()\n"},
    ),
    Piece(
        "scheduler",
        "restarts by epoch + i / n",
        {
            "before": "i, last = 0, -1\n",
            "first": "i, last = (i + 1 if last == epoch else 0), epoch\n",
            "scheduler": "CosineAnnealingWarmRestarts(optimizer, 1)",
            "after_step": "scheduler.step(epoch + i / len(loader))\n",
        },
        needs=(Need.LOADER,),
        without=("loop",),
    ),
    Piece(
        "scheduler",
        "LambdaLR by a count",
        {
            "before": "steps = 0\n",
            "scheduler": "LambdaLR(optimizer, lambda n: 1 / (1 + n))",
            "after_step": "steps += 1\nscheduler.step(steps)\n",
        },
        needs=(Need.LOADER,),
        without=("loop",),
    ),
    Piece(
        "scheduler",
        "LambdaLR at the head",
        {"scheduler": "LambdaLR(optimizer, lambda n: 1 / (1 + n))", "first": "scheduler.step()\n"},
    ),
    Piece(
        "scheduler",
        "StepLR twice on a batch",
        {"scheduler": "StepLR(optimizer, 2, 0.5)", "after_step": "scheduler.step()\nscheduler.step()\n"},
        Verdict.REFUSED,
        ("twice on a batch",),
        needs=(Need.LOADER,),
    ),
    Piece(
        "scheduler",
        "StepLR per epoch",
        {"scheduler": "StepLR(optimizer, 1, 0.5)", "epoch_end": "scheduler.step()\n"},
        needs=(Need.LOADER,),
    ),
    Piece(
        "scheduler",
        "ReduceLROnPlateau per epoch",
        {"scheduler": "ReduceLROnPlateau(optimizer, patience=0)", "epoch_end": "scheduler.step(1.0)\n"},
        needs=(Need.LOADER,),
    ),
    Piece(
        "scheduler",
        "StepLR per epoch, not prepared",
        {
            "scheduler": "StepLR(optimizer, 1, 0.5)",
            "epoch_end": "scheduler.step()\n",
            "scheduler_name": "",
        },
        Verdict.REFUSED,
        ("scheduler = ctx.prepare(scheduler)",),
        needs=(Need.LOADER,),
    ),
]

PRECISIONS: list[Piece] = [
    Piece("precision", "plain"),
    Piece(
        "precision",
        "clip_grad_norm_",
        {"before_step": "nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n"},
        needs=(Need.SLICE,),
    ),
    Piece(
        "precision",
        "ctx.clip_grad_norm",
        {"before_step": "ctx.clip_grad_norm(0.3)\n"},
        needs=(Need.SYNC,),
        # it clips what servers have added up, and leaves the gradients of the script as they are
        without=("body=no zero_grad",),
    ),
    Piece(
        "precision",
        "clip_grad_value_",
        {"before_step": "nn.utils.clip_grad_value_(model.parameters(), 0.1)\n"},
        needs=(Need.SLICE,),
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
        needs=(Need.SINGLE,),
        # a step that is skipped leaves buffers as they were
        without=("scheduler", "body=no zero_grad", "model=BatchNorm", "model=a buffer that counts"),
    ),
    Piece(
        "precision",
        "autocast",
        {"forward": "with torch.autocast('cpu', dtype=torch.bfloat16):\n    loss = $loss\n"},
        needs=(Need.SINGLE,),
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
