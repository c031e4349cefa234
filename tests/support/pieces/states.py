"""State that a script brings, changes and keeps. The first piece of each kind is the plainest."""

from __future__ import annotations

from tests.support.pieces.base import Need, Piece, Verdict

STATES: list[Piece] = [
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
        without=("model=dropout",),  # ps.init seeds what is drawn before prepare, and threads of a test have contexts
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
        Verdict.EITHER,
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
        Verdict.EITHER,
    ),
    Piece(
        "state",
        "model loaded between epochs",
        {
            "epoch_end": "if epoch == 0 and $count > 1:\n"
            "    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})\n"
        },
        Verdict.EITHER,
        needs=(Need.LOADER,),
    ),
    Piece(
        "state",
        "weights changed once",
        {"late": "if len(seen) == 1:\n    with torch.no_grad():\n        next(model.parameters()).mul_(0.5)\n"},
        Verdict.EITHER,
        needs=(Need.SINGLE,),
        # a change after the last step is the script's own: there is no version that would undo it
        without=("data=fewer samples than a batch", "data=one sample"),
    ),
    Piece(
        "state",
        "weights changed through data",
        {"late": "if len(seen) == 1:\n    next(model.parameters()).data.mul_(0.5)\n"},
        Verdict.EITHER,
        needs=(Need.SINGLE,),
        # a change after the last step is the script's own: there is no version that would undo it
        without=("data=fewer samples than a batch", "data=one sample"),
    ),
    Piece(
        "state",
        "another tensor for a weight",
        {"late": "if len(seen) == 1:\n    p = next(model.parameters())\n    p.data = p.data * 0.5\n"},
        Verdict.EITHER,
        needs=(Need.SINGLE,),
        # a change after the last step is the script's own: there is no version that would undo it
        without=("data=fewer samples than a batch", "data=one sample"),
    ),
    Piece(
        "state",
        "weights clipped in each step",
        {"late": "for p in model.parameters():\n    p.data.clamp_(-0.2, 0.2)\n"},
        Verdict.EITHER,
        needs=(Need.SINGLE,),
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
        needs=(Need.SINGLE,),
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
        Verdict.EITHER,
        needs=(Need.SINGLE, Need.LOADER),
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
        needs=(Need.SINGLE,),
        without=("scheduler",),
    ),
    Piece(
        "state",
        "lr changed between epochs",
        {"epoch_end": "optimizer.param_groups[0]['lr'] *= 0.5\n"},
        needs=(Need.LOADER,),
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
        Verdict.EITHER,
        without=("precision",),
    ),
    Piece(
        "state",
        "hook after the optimizer's step",
        {
            "before": "optimizer.register_step_post_hook(\n"
            "    lambda o, a, k: found.update(hooked=found.get('hooked', 0) + 1)\n)\n"
        },
        Verdict.EITHER,
        needs=(Need.SINGLE,),
        # torch's own optimizers differ in whether they step then
        without=("precision=GradScaler that overflows",),
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

KEEPS: list[Piece] = [
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
            "    score = float(model(data[0][0][None]).sum())\n"
            "model.train()\n"
            "if not ctx.steps_past_epoch:\n"
            "    found.setdefault('scores', {})[epoch] = score\n"
        },
        needs=(Need.LOADER,),
    ),
    Piece(
        "keep",
        "the best model by an evaluation on all workers",
        {
            "epoch_end": """\
model.eval()
with torch.no_grad():
    for x, y in ctx.evaluate(DataLoader(TensorDataset(inputs, targets), batch_size=4)):
        ctx.gather(float($loss))
model.train()
score = ctx.agree(sum(ctx.gathered), "score")
found.setdefault("scores", {})[epoch] = score
if not ctx.went_back and not ctx.steps_past_epoch and score <= min(ctx.agreed("score")):
    found.setdefault("epochs", {})[epoch] = {name: value.clone() for name, value in model.state_dict().items()}
"""
        },
        needs=(Need.LOADER, Need.SYNC),
    ),
    Piece(
        "keep",
        "weights between epochs",
        {
            "epoch_end": "weights = {name: value.clone() for name, value in model.state_dict().items()}\n"
            "if not ctx.steps_past_epoch:\n"
            "    found.setdefault('epochs', {})[epoch] = weights\n"
        },
        needs=(Need.LOADER,),
    ),
    Piece(
        "keep",
        "learning rates",
        {"late": "found.setdefault('lr', []).append(optimizer.param_groups[0]['lr'])\n"},
        needs=(Need.SINGLE,),
    ),
]
