"""The optimizers that servers run, and the numbers each of them takes. Tables and checks only, no code of theirs.

Names and numbers arrive from other machines, so everything not listed here is refused. The name of a class that is not
torch's says which state it keeps; whether a server runs it is decided by that server's own configuration.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from paramserver.errors import ModelError

HyperValue = float | bool | tuple[float, ...]
Hypers = Mapping[str, HyperValue]
Shape = tuple[int, ...]

# Beyond this a hyper-parameter is a mistake, and zeros may no longer stay zeros in float32.
LARGEST = 1e30


class Form(enum.Enum):
    NUMBER = "a number"
    FLAG = "true or false"
    PAIR = "a pair of numbers"
    TRIPLE = "three numbers"
    # torch has None or a number as the first of the two; without a first number it stands for None.
    LATE_PAIR = "one or two numbers"
    WHOLE = "a whole number"
    # torch has a text or None; it travels as the place in `Field.choices`.
    CHOICE = "the number of a choice"


_LENGTHS = {Form.PAIR: (2,), Form.TRIPLE: (3,), Form.LATE_PAIR: (1, 2)}


@dataclass(frozen=True, slots=True)
class Field:
    """One hyper-parameter; every number in it lies in ``[low, high]``, without ``high`` itself if it is ``open``.

    ``choices``: what torch takes, for `Form.CHOICE`.
    """

    form: Form = Form.NUMBER
    low: float = 0.0
    high: float = LARGEST
    open: bool = False
    choices: tuple[str | None, ...] = ()


class Extent(enum.Enum):
    """The shape of a state array, where it is not that of its tensor."""

    ROWS = "a number per row"
    COLUMNS = "a number per column"
    VECTOR = "a number per element, and only for tensors with fewer than two dimensions"


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer: its class in torch.optim (empty: our own), all its hyper-parameters, and the shape of its state.

    ``arrays``: state with a number per element, or as ``extents`` says. ``scalars``: state that is one number for the
    whole tensor. ``structural``: hyper-parameters that decide which arrays exist, with the array each needs; they
    cannot be switched on or off once training has begun. ``whole``: an update needs all elements of a tensor, so one
    server holds them all. ``dimensions``: those that every tensor must have, None: any. ``own``: of a class that is not
    torch's, module and class; then ``fields`` is empty, and it has any numbers. ``counts``: those of ``scalars`` that
    the class keeps as whole numbers of Python.
    """

    title: str
    fields: Mapping[str, Field]
    arrays: frozenset[str]
    scalars: frozenset[str]
    structural: Mapping[str, str]
    whole: bool = False
    extents: Mapping[str, Extent] = field(default_factory=dict)
    dimensions: int | None = None
    own: str = ""
    counts: frozenset[str] = frozenset()

    def array_shape(self, key: str, shape: Shape) -> Shape | None:
        """The shape of a state array of a tensor of this shape; None: such a tensor does not have it.

        >>> RULES["adafactor"].array_shape("row_var", (3, 5)), RULES["adafactor"].array_shape("variance", (3, 5))
        ((3, 1), None)
        """
        extent = self.extents.get(key)
        if extent is None:
            return shape
        if extent is Extent.VECTOR:
            return shape if len(shape) < 2 else None
        if len(shape) < 2:
            return None
        return (*shape[:-1], 1) if extent is Extent.ROWS else (*shape[:-2], 1, shape[-1])

    def array_elements(self, key: str, shape: Shape) -> int:
        """How many elements a state array of a tensor of this shape has; 0: such a tensor does not have it.

        >>> RULES["adafactor"].array_elements("row_var", (3, 5)), RULES["adafactor"].array_elements("variance", ())
        (3, 1)
        """
        made = self.array_shape(key, shape)
        return 0 if made is None else math.prod(made)

    def arrays_of(self, hypers: Hypers, shape: Shape) -> dict[str, Shape]:
        """The state arrays that a tensor of this shape has with these hyper-parameters, and their shapes."""
        off = {array for flag, array in self.structural.items() if not hypers[flag]}
        found = {key: self.array_shape(key, shape) for key in sorted(self.arrays - off)}
        return {key: made for key, made in found.items() if made is not None}


_NUMBER = Field()
_ANY = Field(low=-LARGEST)
_FLAG = Field(Form.FLAG)
_BETAS = Field(Form.PAIR, high=1.0, open=True)
# The running product of NAdam's betas is kept in float32 and must stay below one.
_NADAM_BETAS = Field(Form.PAIR, high=1.0 - 1e-6)
_COMMON = {"lr": _NUMBER, "weight_decay": _NUMBER, "maximize": _FLAG}
_ADAM = {"betas": _BETAS, "eps": _NUMBER, "amsgrad": _FLAG}
_DECOUPLED = {"decoupled_weight_decay": _FLAG}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _rule(
    title: str,
    fields: Mapping[str, Field],
    arrays: tuple[str, ...],
    scalars: tuple[str, ...] = ("step",),
    structural: Mapping[str, str] = MappingProxyType({}),
) -> Rule:
    every = dict(sorted({**_COMMON, **fields}.items()))
    return Rule(title, every, frozenset(arrays), frozenset(scalars), structural)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "sgd": _rule("SGD", {"momentum": _NUMBER, "dampening": _ANY, "nesterov": _FLAG}, ("momentum_buffer",), ()),
        "adam": _rule(
            "Adam", {**_ADAM, **_DECOUPLED}, (*_MOMENTS, "max_exp_avg_sq"), structural={"amsgrad": "max_exp_avg_sq"}
        ),
        "adamw": _rule("AdamW", _ADAM, (*_MOMENTS, "max_exp_avg_sq"), structural={"amsgrad": "max_exp_avg_sq"}),
        "adagrad": _rule(
            "Adagrad", {"lr_decay": _NUMBER, "initial_accumulator_value": _NUMBER, "eps": _NUMBER}, ("sum",)
        ),
        "rmsprop": _rule(
            "RMSprop",
            {"alpha": _NUMBER, "eps": _NUMBER, "momentum": _NUMBER, "centered": _FLAG},
            ("square_avg", "grad_avg", "momentum_buffer"),
            structural={"centered": "grad_avg", "momentum": "momentum_buffer"},
        ),
        "nadam": _rule(
            "NAdam",
            {"betas": _NADAM_BETAS, "eps": _NUMBER, "momentum_decay": _NUMBER, **_DECOUPLED},
            _MOMENTS,
            ("step", "mu_product"),
        ),
        "radam": _rule("RAdam", {"betas": _BETAS, "eps": _NUMBER, **_DECOUPLED}, _MOMENTS),
        "adamax": _rule("Adamax", {"betas": _BETAS, "eps": _NUMBER}, ("exp_avg", "exp_inf")),
        "adadelta": _rule("Adadelta", {"rho": Field(high=1.0), "eps": _NUMBER}, ("square_avg", "acc_delta")),
        "asgd": _rule("ASGD", {"lambd": _ANY, "alpha": _ANY, "t0": _ANY}, ("ax",), ("step", "eta", "mu")),
        "rprop": Rule(
            "Rprop",
            {"etas": Field(Form.PAIR), "lr": _NUMBER, "maximize": _FLAG, "step_sizes": Field(Form.PAIR)},
            frozenset({"prev", "step_size"}),
            frozenset({"step"}),
            {},
        ),
        "adafactor": replace(
            _rule(
                "Adafactor",
                {"beta2_decay": Field(low=-LARGEST, high=0.0), "eps": Field(Form.LATE_PAIR), "d": Field(low=1.0)},
                ("row_var", "col_var", "variance"),
            ),
            whole=True,
            extents=MappingProxyType(
                {"row_var": Extent.ROWS, "col_var": Extent.COLUMNS, "variance": Extent.VECTOR},
            ),
        ),
        "muon": Rule(
            "Muon",
            {
                "adjust_lr_fn": Field(Form.CHOICE, choices=(None, "original", "match_rms_adamw")),
                "eps": _NUMBER,
                "lr": _NUMBER,
                "momentum": _NUMBER,
                "nesterov": _FLAG,
                "ns_coefficients": Field(Form.TRIPLE, low=-LARGEST),
                "ns_steps": Field(Form.WHOLE, high=99),
                "weight_decay": _NUMBER,
            },
            frozenset({"momentum_buffer"}),
            frozenset(),
            {},
            whole=True,
            dimensions=2,
        ),
        # new = old + the sum of what was pushed
        "sum": Rule("", {}, frozenset(), frozenset(), {}),
    }
)

SUPPORTED = ", ".join(rule.title for rule in RULES.values() if rule.title)


# A class that is not torch's, with the names of its state: "mylib.optim:Lion arrays=exp_avg counts=step whole".
_OWN = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_][\w.]*)((?: (?:arrays|numbers|counts)=[\w,]+)*)( whole)?", re.ASCII)
_OWN_CHARS = 1000
# Numbers in one hyper-parameter of such a class.
_OWN_NUMBERS = 16


def own_name(path: str, arrays: Iterable[str], numbers: Iterable[str], counts: Iterable[str], whole: bool) -> str:
    """The name of an optimizer that is not torch's. It says what every process has to know of its state.

    >>> own_name("mylib.optim:Lion", ["exp_avg"], [], ["step"], whole=False)
    'mylib.optim:Lion arrays=exp_avg counts=step'
    """
    lists = (("arrays", sorted(arrays)), ("numbers", sorted(numbers)), ("counts", sorted(counts)))
    return path + "".join(f" {kind}={','.join(keys)}" for kind, keys in lists if keys) + (" whole" if whole else "")


@lru_cache(64)
def rule_of(name: str) -> Rule:
    """The rule of an optimizer: out of the table, or out of the name itself. Raises ModelError if there is none."""
    if name in RULES:
        return RULES[name]
    found = _OWN.fullmatch(name) if len(name) <= _OWN_CHARS else None
    if found is None:
        raise ModelError(f"optimizer {_show(name)} is not supported; use one of {', '.join(RULES)}")
    lists = {kind: frozenset(keys.split(",")) for kind, keys in (part.split("=") for part in found[2].split())}
    arrays, numbers, counts = (lists.get(kind, frozenset()) for kind in ("arrays", "numbers", "counts"))
    return Rule("", {}, arrays, numbers | counts, {}, whole=bool(found[3]), own=found[1], counts=counts)


def validate(name: str, groups: Sequence[Mapping[str, object]], first: int = 0) -> None:
    """Raises ModelError, naming group and field, unless servers can run this optimizer with these numbers.

    ``first``: the number of the first of these groups.
    """
    rule = rule_of(name)
    if not groups:
        raise ModelError(f"optimizer {name} has no parameter group; give at least one")
    for index, hypers in enumerate(groups, first):
        problem = _find_in_group(rule, hypers)
        if problem is not None:
            raise ModelError(f"optimizer {name}, parameter group {index}: {problem}")


def validate_shape(name: str, tensor: str, shape: Shape) -> None:
    """Raises ModelError, naming the tensor, unless a known optimizer can train a tensor of this shape.

    >>> validate_shape("muon", "weight", (3, 5))
    """
    rule = rule_of(name)
    if rule.dimensions is not None and len(shape) != rule.dimensions:
        raise ModelError(
            f"{rule.title} trains tensors with {rule.dimensions} dimensions only, and {tensor!r} has shape {shape}: "
            "give the other tensors an optimizer of their own, for example AdamW (ctx.prepare(model, muon, adamw))"
        )


def validate_change(name: str, before: Sequence[Hypers], after: Sequence[Hypers], first: int = 0) -> None:
    """Raises ModelError unless training may go on with the numbers ``after`` where it had the valid ``before``.

    ``first``: the number of the first of these groups.
    """
    validate(name, after, first)
    if len(before) != len(after):
        raise ModelError(f"optimizer {name} had {len(before)} parameter groups and now has {len(after)}; keep them all")
    for index, (one, other) in enumerate(zip(before, after, strict=True), first):
        for key in rule_of(name).structural:
            if bool(one[key]) != bool(other[key]):
                raise ModelError(
                    f"optimizer {name}, parameter group {index}: {key} cannot change from {one[key]} to {other[key]}"
                    " during training; begin a new job for that"
                )


def _find_in_group(rule: Rule, hypers: Mapping[str, object]) -> str | None:
    for key in hypers:
        if rule.own:
            problem = _find_in_own(key, hypers[key])
            if problem is not None:
                return problem
        elif key not in rule.fields:
            known = ", ".join(rule.fields) or "none"
            return f"unknown hyper-parameter {_show(key)}; known: {known}"
    for key, wanted in rule.fields.items():
        if key not in hypers:
            return f"{key} is missing; give {wanted.form.value}"
        problem = _find_in_value(wanted, hypers[key])
        if problem is not None:
            return f"{key} is {_show(hypers[key])} and {problem}"
    if hypers.get("nesterov") and "dampening" in hypers and (not hypers["momentum"] or hypers["dampening"]):
        return "nesterov needs a momentum above 0 and a dampening of 0"
    etas = hypers.get("etas")
    if isinstance(etas, tuple) and not 0.0 < etas[0] < 1.0 < etas[1]:
        return f"etas are {_show(etas)}: the first must lie between 0 and 1, the second above 1"
    return None


def _find_in_own(key: str, value: object) -> str | None:
    if not key.isidentifier() or len(key) > 64:
        return f"{_show(key)} cannot be the name of a hyper-parameter"
    numbers = value if isinstance(value, tuple) else (value,)
    if len(numbers) > _OWN_NUMBERS or not all(isinstance(n, int | float) and abs(n) <= LARGEST for n in numbers):
        return f"{key} is {_show(value)} and must be a number, true or false, or up to {_OWN_NUMBERS} numbers"
    return None


def _find_in_value(wanted: Field, value: object) -> str | None:
    if wanted.form is Form.FLAG:
        return None if isinstance(value, bool) else "must be true or false"
    numbers: tuple[object, ...]
    if wanted.form in _LENGTHS:
        if not isinstance(value, tuple) or len(value) not in _LENGTHS[wanted.form]:
            return f"must be {wanted.form.value}"
        numbers = value
    else:
        numbers = (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            return f"must be {wanted.form.value}"
        if not math.isfinite(number):
            return "must be finite"
        if wanted.form is Form.CHOICE and number not in range(len(wanted.choices)):
            return f"must be a whole number below {len(wanted.choices)}"
        if wanted.form is Form.WHOLE and number != int(number):
            return "must be a whole number"
        if not wanted.low <= number <= wanted.high or (wanted.open and number == wanted.high):
            return f"must be at least {wanted.low:g} and {'below' if wanted.open else 'at most'} {wanted.high:g}"
    return None


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
