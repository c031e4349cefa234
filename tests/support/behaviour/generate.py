"""Draws scripts from a seed, and writes them down as Python that a user could have written. Pure functions."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from string import Template

from tests.support.pieces.base import Need, Piece, Verdict
from tests.support.pieces.kinds import KINDS, piece

# How many scripts of a hundred have something else than the plainest piece, by kind; 50 where nothing is said.
_OFTEN = {
    "optimizer": 85,
    "model": 70,
    "loop": 45,
    "end": 30,
    "fault": 12,
    "client": 12,
    "type": 20,
    "flag": 15,
    "groups": 20,
}
# Slots to which several pieces may add lines; of every other one there is one text.
_ADDED = frozenset(
    {"imports", "first", "before", "after", "before_step", "after_step", "late", "epoch_end", "keep", "more"}
)
# What a script keeps from step to step in its own process is lost with it: of these kinds only these pieces do not.
_KEPT = frozenset({"state", "keep", "fault", "end", "scheduler", "loop"})
_SURVIVES = frozenset(
    {
        *(
            "state=none",
            "state=loaded before prepare",
            "state=weights changed before prepare",
            "state=hook on gradients",
        ),
        *("keep=weights", "fault=none", "end=close", "end=no close", "end=close twice", "end=sys.exit(0) at the end"),
        *("scheduler=none", "scheduler=StepLR", "scheduler=CosineAnnealingLR", "scheduler=StepLR per epoch"),
        *("scheduler=restarts by epoch + i / n", "scheduler=LambdaLR at the head"),
        *("loop=epochs", "loop=range"),
    }
)
# What all workers agree on is not lost with a process.
_AGREED = {"keep=the best model by an evaluation on all workers"}
_PLAIN = {
    "imports": "",
    "data": "",
    "samples": "$drawn",
    "options": "",
    "loader": "loader = DataLoader(data, batch_size=$batch$options)\n",
    "build": "model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))\n",
    "fill": "with torch.no_grad():\n"
    "    for k, p in enumerate(model.parameters()):\n        p.copy_(numbers(10 + k, *p.shape) * 0.4)\n",
    "type": "torch.float64",
    "typed": "model = model.to($type)\n",
    "parameters": "model.parameters()",
    "optimizer": "optimizer = torch.optim.$class($parameters, $hypers$flag)\n",
    "flag": "",
    "before": "",
    "scheduler": "",
    "scheduler_name": ", scheduler",
    "loader_name": ", loader",
    "more": "",
    "given": "",
    "after": "",
    "epochs": "ctx.epochs($count)",
    "len": "len(loader)",
    "loop": "for epoch in $epochs:\n    for x, y in loader:\n        BODY\n    EPOCH_END\n",
    "first": "",
    "loss": "F.mse_loss(model(x), y)",
    "forward": "loss = $loss\n",
    "backward": "loss.backward()\n",
    "before_step": "",
    "step": "optimizer.step()\n",
    "after_step": "",
    "zero": "optimizer.zero_grad()\n",
    "late": "",
    "epoch_end": "",
    "keep": "",
    "end": "ctx.close()\n",
}
_BODY = "$first$forward$backward$before_step$step$after_step${zero}seen.append(float(loss.detach()))\n$late"
# Says in which epoch it trains, and gives somebody the time to kill it.
_PACE = """\
open(f"{os.environ['FOUND']}-{ctx.rank}-begun-{globals().get('epoch', 0)}", "w").close()
time.sleep(0.05)
"""
_TEXT = """\
import copy
import os
import random
import signal
import sys
import time
$imports
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import paramserver as ps


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


seen, found, n = [], {}, 0
ctx = ps.init()
inputs = numbers(1, $samples, 4).to($type)
targets = torch.tanh(numbers(2, $samples, 2) + inputs.double().sum(1, keepdim=True)).to($type)
data = TensorDataset(inputs, targets)
$data$loader$build${fill}$typed$optimizer$before$early$scheduler$prepare$after$loop
found.update(seen=seen, model=model.state_dict())
${keep}torch.save(found, f"{os.environ.get('FOUND', 'found')}-{ctx.rank}.pt")
$end"""


@dataclass(frozen=True, slots=True)
class Form:
    """Where a script runs. ``servers`` 0: alone, in one process without a cluster.

    ``changes``: the modes to which the job is changed while it trains. ``real``: in processes, with `paramserver run`;
    of these the ``kills`` are killed while it trains, one after the other. ``again``: "used" and "fresh" if it runs a
    second time with the same directory of checkpoints, without and with ``--fresh``; "resume" if it is stopped and
    resumed. ``late``: the first kill strikes in the second epoch, and there are no checkpoints but those of the first
    and the last version, so that the job goes back to the first epoch.
    """

    servers: int = 0
    workers: int = 1
    slices: int = 1
    mode: str = "sync"
    staleness: int = 3
    changes: tuple[str, ...] = ()
    real: bool = False
    kills: tuple[str, ...] = ()
    again: str = ""
    late: bool = False

    @property
    def loose(self) -> bool:
        """Slices are applied in an order that nobody knows, to weights of other versions than they began with."""
        back = bool(self.kills) or self.again == "resume"  # what was counted since the checkpoint comes again
        return bool(self.changes) or (self.mode == "async" and (self.workers > 1 or back))

    def __str__(self) -> str:
        how = f"sync, {self.slices} slices in a step" if self.mode == "sync" else f"async, staleness {self.staleness}"
        where = f"{self.servers} servers, {self.workers} workers" if self.servers else "alone"
        more = f"; changes to {', '.join(self.changes)}" if self.changes else ""
        more += "; real processes" if self.real else ""
        more += f"; again: {self.again}" if self.again else ""
        more += "; late" if self.late else ""
        return f"{where}; {how}{more}{'; killed: ' + ', '.join(self.kills) if self.kills else ''}"


@dataclass(frozen=True, slots=True)
class Script:
    """A drawn script: its pieces by kind, and its numbers."""

    seed: int
    form: Form
    pieces: tuple[Piece, ...]
    samples: int = 11
    batch: int = 3
    epochs: int = 2
    hypers: str = "lr=0.05"

    def has(self, label: str) -> bool:
        """Whether this piece is in it."""
        return any(p.label == label for p in self.pieces)

    def of(self, kind: str) -> Piece:
        """Its piece of a kind."""
        return next(p for p in self.pieces if p.kind == kind)

    @property
    def verdict(self) -> Verdict:
        """What must become of it."""
        verdicts = {p.verdict for p in self.pieces}
        return next((v for v in (Verdict.REFUSED, Verdict.EITHER) if v in verdicts), Verdict.EQUAL)

    @property
    def says(self) -> tuple[str, ...]:
        """Parts of the sentence that must refuse it. Empty: any sentence will do."""
        if any(p.verdict is Verdict.EITHER for p in self.pieces):
            return ()
        return tuple(part for p in self.pieces if p.verdict is Verdict.REFUSED for part in p.says)

    @property
    def tolerance(self) -> float:
        """How far numbers may be apart from those of plain torch, relatively."""
        return max([1e-7, *(p.tolerance for p in self.pieces)])

    @property
    def labels(self) -> tuple[str, ...]:
        """What is not plain about it."""
        return tuple(p.label for p in self.pieces if p is not KINDS[p.kind][0])

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.form}; {', '.join(self.labels) or 'plain'}; must be {self.verdict.value}"


def fits(form: Form, pieces: Iterable[Piece]) -> bool:
    """Whether these pieces mean something together, and the same as in plain torch, where the script runs so."""
    chosen = list(pieces)
    needs = {need for p in chosen for need in p.needs}
    if Need.SLICE in needs and form.slices != 1:
        return False
    if Need.SINGLE in needs and (form.slices != 1 or form.workers != 1):
        return False
    if Need.ALONE in needs and form.servers and (not form.real or form.kills or form.again):
        return False
    if Need.SYNC in needs and form.mode != "sync":
        return False
    if Need.SEVERAL in needs and form.workers < 2:
        return False
    by_kind = {p.kind: p for p in chosen}
    if form.loose and (by_kind["model"].name != "counts" or needs & {Need.SINGLE, Need.SYNC}):
        return False
    if form.kills or form.again:
        survives = _SURVIVES if form.again else _SURVIVES | _AGREED
        if any(p.label not in survives for p in chosen if p.kind in _KEPT):
            return False
        if "samples" in by_kind["data"].slots:  # it would be over at once
            return False
        if any("n +=" in text or "len(seen)" in text for p in chosen for text in p.slots.values()):
            return False
    plain = {kind: by_kind[kind] is KINDS[kind][0] for kind in by_kind}
    loop = by_kind["loop"].slots
    if Need.LOADER in needs and loop.get("loader_name") == "":
        return False
    if "EPOCH_END" not in loop.get("loop", "EPOCH_END") and any("epoch_end" in p.slots for p in chosen):
        return False
    labels = {p.label for p in chosen}
    if any(other in labels or not plain.get(other, True) for p in chosen for other in p.without):
        return False
    slots = [slot for p in chosen for slot in p.slots]
    return all(slots.count(slot) == 1 or slot in _ADDED for slot in slots)


def draw(seed: int, known: Callable[[Script], bool] = lambda script: False, real: bool = False) -> Script:
    """The script of this seed. ``known``: those that are not drawn, since it is known that they fail.

    ``real``: one for real processes.
    """
    chance = random.Random(seed)
    while True:
        script = _draw(chance, seed, _real_form(chance) if real else _form(chance))
        if not known(script):
            return script


def _draw(chance: random.Random, seed: int, form: Form) -> Script:
    illegal = seed % 3 == 0 and not (form.kills or form.again or form.loose)
    kinds = list(KINDS)
    chance.shuffle(kinds)
    first_of_all = chance.choice(("loop", "end", "state", ""))  # what is chosen first finds room
    kinds.sort(key=lambda kind: kind != first_of_all)
    chosen = {kind: KINDS[kind][0] for kind in KINDS}
    # First one that must be refused, if there is to be one, so that it finds room.
    if illegal:
        bad = [p for pieces in KINDS.values() for p in pieces if p.verdict is Verdict.REFUSED]
        first = seed // 3 % len(bad)  # each in its turn
        if Need.SEVERAL in bad[first].needs:
            form = replace(form, servers=max(1, form.servers), workers=max(2, form.workers))
        one = next(
            p for p in [*bad[first:], *bad[:first]] if p.kind == "client" or fits(form, {**chosen, p.kind: p}.values())
        )
        chosen[one.kind] = one
        kinds.remove(one.kind)
    elif not form.real and not form.loose and chance.randrange(100) < _OFTEN["client"]:
        chosen["client"] = chance.choice([p for p in KINDS["client"][1:] if p.verdict is Verdict.EQUAL])
    elif seed % 3 and not (form.real or form.loose or form.kills or form.again):
        legal = [
            p
            for kind, pieces in KINDS.items()
            if kind != "client"
            for p in pieces[1:]
            if p.verdict is not Verdict.REFUSED
        ]
        one = legal[2 * seed // 3 % len(legal)]  # each in its turn, where it means something
        chosen[one.kind] = one
        kinds.remove(one.kind)
        forms = (form, Form(1, 1, 1), Form(0, 1, 1), Form(1, 2, 1))
        form = next(way for way in forms if fits(way, chosen.values()))
    if chosen["client"].name != "none":
        form = Form(chance.choice((0, 1, 2)), 1, 1, form.mode, form.staleness)
    if form.loose:
        chosen["model"] = piece("model=counts")
        kinds.remove("model")
    for kind in [kind for kind in kinds if kind != "client"]:
        if chance.randrange(100) >= _OFTEN.get(kind, 50):
            continue
        room = [
            p
            for p in KINDS[kind][1:]
            if p.verdict is not Verdict.REFUSED
            and fits(form, {**chosen, kind: p}.values())
            and (p.verdict is Verdict.EQUAL or not any(q.verdict is Verdict.EITHER for q in chosen.values()))
        ]
        if room:
            chosen[kind] = chance.choice(room)
    script = Script(
        seed,
        form,
        tuple(chosen[kind] for kind in KINDS),
        samples=chance.randrange(20, 26) if form.kills or form.again else chance.randrange(5, 26),
        batch=2 if form.kills or form.again else chance.randrange(2, 6),
        epochs=3 if form.kills or form.again else chance.randrange(1, 4),
    )
    if "len(seen) == 1" in script.of("state").slots.get("late", ""):
        script = replace(script, samples=max(script.samples, 3 * script.batch))
    if script.has("model=BatchNorm") and script.samples % script.batch == 1:  # it takes no batch of one sample
        script = replace(script, samples=script.samples + 1)
    return replace(script, hypers=hypers(script.of("optimizer").name, chance))


def _form(chance: random.Random) -> Form:
    where = chance.randrange(12)
    staleness = chance.choice((0, 3))
    if where < 4:
        mode = "async" if chance.randrange(5) == 0 else "sync"
        return Form(0, 1, 1 if mode == "async" else chance.choice((1, 1, 2, 3)), mode, staleness)
    if where < 6:
        mode = "async" if chance.randrange(3) == 0 else "sync"
        return Form(chance.choice((1, 2)), 1, 1, mode, staleness)
    if where == 6:
        return Form(chance.choice((1, 2)), chance.choice((2, 3)), 1, "async", staleness)
    if where == 7:
        first = chance.choice(("sync", "async"))
        changes = tuple(("async" if first == "sync" else "sync", first)[: chance.choice((1, 2))])
        return Form(chance.choice((1, 2)), chance.choice((1, 2, 3)), 1, first, staleness, changes)
    workers = chance.choice((1, 2, 2, 3))
    return Form(chance.choice((1, 2, 3)), workers, chance.choice((1, 2, workers, 4)))


def _real_form(chance: random.Random) -> Form:
    mode = "async" if chance.randrange(4) == 0 else "sync"
    workers = chance.choice((1, 2))
    deaths = (("worker",), ("server",), ("coordinator",), ("worker", "server"), ("server", "worker"))
    kills: tuple[str, ...] = chance.choice(((), (), (), *deaths))
    again = "" if kills else chance.choice(("", "", "used", "fresh", "resume"))
    slices = 1 if mode == "async" else chance.choice((1, 2, 3))
    servers, staleness = chance.choice((1, 2)), chance.choice((0, 3))
    return Form(
        servers, workers, slices, mode, staleness, (), True, kills, again, bool(kills) and chance.random() < 0.5
    )


_HYPERS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("momentum=0.9", "weight_decay=0.01", "dampening=0.1", "momentum=0.5, nesterov=True"),
    "Adam": ("betas=(0.8, 0.99)", "weight_decay=0.01", "amsgrad=True", "eps=1e-6"),
    "AdamW": ("betas=(0.8, 0.99)", "weight_decay=0.1", "amsgrad=True", "eps=1e-6"),
    "Adagrad": ("lr_decay=0.1", "weight_decay=0.01", "initial_accumulator_value=0.1"),
    "RMSprop": ("alpha=0.9", "momentum=0.5", "centered=True", "weight_decay=0.01"),
    "NAdam": ("betas=(0.8, 0.99)", "momentum_decay=0.01", "weight_decay=0.01", "decoupled_weight_decay=True"),
    "RAdam": ("betas=(0.8, 0.99)", "weight_decay=0.01", "decoupled_weight_decay=True"),
    "Adamax": ("betas=(0.8, 0.99)", "weight_decay=0.01"),
    "Adadelta": ("rho=0.8", "weight_decay=0.01"),
}


def hypers(name: str, chance: random.Random) -> str:
    """Random hyper-parameters of an optimizer, as its constructor takes them."""
    options = [one for one in _HYPERS.get(name, ()) if chance.randrange(2)]
    if any("nesterov" in one for one in options):
        options = [one for one in options if "dampening" not in one and one != "momentum=0.9"]
    return ", ".join([f"lr={chance.choice((0.1, 0.03, 0.007))}", *options])


def render(script: Script) -> str:
    """The script as Python. What it finds it writes to the file that the variable FOUND begins."""
    slots = dict(_PLAIN)
    for p in script.pieces:
        for slot, text in p.slots.items():
            slots[slot] = slots.get(slot, "") + text if slot in _ADDED else text
    if script.form.kills or script.form.again:
        slots["first"] = _PACE + slots["first"]
    elif script.form.changes:
        slots["first"] += "time.sleep(0.005)\n"
    loader, scheduler = slots["loader_name"], slots["scheduler_name"] if slots["scheduler"] else ""
    slots["early"] = ""
    if slots["scheduler"]:
        if loader and "$len" in slots["scheduler"]:  # only a prepared loader knows how long an epoch is
            slots["early"], loader = "loader = ctx.prepare(loader)\n", ""
        slots["scheduler"] = f"scheduler = {slots['scheduler']}\n"
    rest = f"model, optimizer{loader}{scheduler}"
    given = f"{rest}{slots['more']}{slots['given']}"
    slots.setdefault("prepare", f"{rest}{', _' * bool(slots['more'])} = ctx.prepare({given})\n")
    slots["again"] = slots["optimizer"]
    slots["loop"] = "".join(
        line.replace("BODY", "@BODY").replace("EPOCH_END", "@EPOCH_END") for line in slots["loop"].splitlines(True)
    )
    numbers = {
        "drawn": str(script.samples),
        "batch": str(script.batch),
        "count": str(script.epochs),
        "class": script.of("optimizer").name,
        "hypers": script.hypers,
    }
    text = slots.pop("text", _TEXT)
    return f"# {script}\n{_filled(text, {**numbers, **slots})}"


def _filled(text: str, slots: Mapping[str, str]) -> str:
    """Fill slots until none is left, then the blocks in loops."""
    body = _deep(_BODY, slots)
    end = _deep(slots["epoch_end"] or "pass\n", slots)
    lines: list[str] = []
    for line in _deep(text, slots).splitlines():
        block = {"@BODY": body, "@EPOCH_END": end}.get(line.strip())
        if block is None:
            lines.append(line)
        else:
            depth = line[: len(line) - len(line.lstrip())]
            lines += textwrap.indent(block, depth).splitlines()
    return "\n".join(lines) + "\n"


def _deep(text: str, slots: Mapping[str, str]) -> str:
    while (filled := Template(text).substitute(slots)) != text:
        text = filled
    return text


def simpler(script: Script) -> Iterator[Script]:
    """Scripts with one thing less, the largest steps first; those that mean nothing are left out."""
    form = script.form
    for p in script.pieces:
        plainest = KINDS[p.kind][0]
        if p is not plainest:
            yield replace(script, pieces=tuple(plainest if q is p else q for q in script.pieces))
    if form.changes:
        yield replace(script, form=replace(form, changes=form.changes[:-1]))
    if form.kills:
        yield replace(script, form=replace(form, kills=form.kills[:-1]))
    if form.again:
        yield replace(script, form=replace(form, again=""))
    if form.servers and form.workers == 1 and not (form.real or form.changes):
        yield replace(script, form=replace(form, servers=0))
    for name, least in (("servers", 1), ("workers", 1), ("slices", 1)):
        if getattr(form, name) > least:
            yield replace(script, form=replace(form, **{name: least}))  # type: ignore[arg-type]
    if form.mode != "sync":
        yield replace(script, form=replace(form, mode="sync"))
    if script.hypers != "lr=0.1":
        yield replace(script, hypers="lr=0.1")
    if script.epochs > 1:
        yield replace(script, epochs=script.epochs - 1)
    for samples in (2 * script.batch, script.samples - 1):
        if script.batch <= samples < script.samples and "len(seen)" not in script.of("state").slots.get("late", ""):
            yield replace(script, samples=samples)
    if script.batch > 2:
        yield replace(script, batch=2)


def of_labels(labels: Iterable[str], form: Form = Form()) -> Script:
    """The plainest script with these pieces. Raises KeyError for a piece that there is not."""
    chosen = {kind: pieces[0] for kind, pieces in KINDS.items()}
    for label in labels:
        one = piece(label)
        chosen[one.kind] = one
    return Script(-1, form, tuple(chosen.values()))
