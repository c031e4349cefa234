"""The compiled kernels: the same bits as torch's, and what happens where there are none."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from paramserver.core.layout.hypers import HyperValue
from paramserver.core.layout.plan import Kind as ChunkKind
from paramserver.core.layout.plan import TensorSpec, make_layout
from paramserver.doctor.finding import Level
from paramserver.doctor.software import Imported, check_kernels
from paramserver.kernels import library
from paramserver.kernels.library import COPY, Formula, Kind, Library
from paramserver.server.arithmetic import compiled
from paramserver.server.arithmetic.apply import ChunkState
from paramserver.server.arithmetic.combine import TILE, Sum
from paramserver.server.arithmetic.compiled import Compiled
from tests.support.unit.arithmetic import torch_only

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None and not library.LIBRARY.exists(), reason="there is no C compiler here"
)

ADAMW: dict[str, HyperValue] = {
    **{"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
}
SGD: dict[str, HyperValue] = {
    **{"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
}


def numbers(seed: int, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(elements, generator=generator)
    return drawn * torch.randn(elements, generator=generator).mul_(8).exp2()


def state_of(elements: int, optimizer: str) -> ChunkState:
    layout = make_layout([TensorSpec("w", (elements,), "float32", ChunkKind.PARAMETER, 0)], 1 << 30)
    return ChunkState(layout.chunks[0], optimizer)


def all_kinds() -> frozenset[Kind]:
    """The formulas that are compiled on this processor."""
    found = compiled.kernels()
    assert found is not None, compiled.report()
    return found.kinds


def bits(tensor: torch.Tensor) -> list[int]:
    """NaNs of any kind count as one."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor).view(torch.int32).tolist()


def test_they_are_built_and_all_of_them_are_used_where_there_is_a_compiler() -> None:
    """With AVX2 and more, torch fuses products and sums as kernels.c does. A sum alone rounds the same everywhere."""
    found = compiled.kernels()
    assert found is not None, compiled.report()
    fused = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert found.kinds >= (frozenset(Kind) if fused else {Kind.COPY}), compiled.report()
    assert compiled.report() == f"compiled: {', '.join(sorted(kind.name.lower() for kind in found.kinds))}"
    with torch_only():
        assert compiled.kernels() is None
    assert compiled.kernels() is found


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 64.0])
def test_sums_have_the_bits_of_torch(count: int, divisor: float) -> None:
    """Contributions of one slice, of several, in any order; infinities and numbers that are not any."""
    parts = [numbers(seed, TILE + 77) for seed in range(count)]
    parts[0][5], parts[-1][6], parts[0][TILE + 3] = math.inf, math.nan, -0.0
    nodes = [((slice_, slice_ + 1), part) for slice_, part in enumerate(parts)][::-1]
    with torch_only():
        wanted = Sum(nodes, count, divisor).whole()
    found = Sum(nodes, count, divisor, look=True)
    assert bits(found.whole()) == bits(wanted)
    tiles = torch.cat([tile.clone() for tile in Sum(nodes, count, divisor).tiles(3, TILE + 9)])
    assert bits(tiles) == bits(wanted[3 : TILE + 9])
    assert found.finite is bool(count > 1 and divisor == 0)


@pytest.mark.parametrize(
    ("kind", "optimizer", "hypers"),
    [
        (Kind.ADD, "sgd", SGD),
        (Kind.SGD, "sgd", {**SGD, "momentum": 0.9, "weight_decay": 0.1}),
        (Kind.SGD, "sgd", {**SGD, "momentum": 0.9, "nesterov": True, "maximize": True}),
        (Kind.ADAM, "adamw", ADAMW),
        (Kind.ADAM, "adam", {**ADAMW, "decoupled_weight_decay": False}),
        (Kind.ADAM, "adam", {**ADAMW, "decoupled_weight_decay": True, "maximize": True}),
    ],
)
def test_updates_have_the_bits_of_torch(
    kind: Kind, optimizer: str, hypers: dict[str, HyperValue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kind``: the formula for it, where that is compiled. Elsewhere the sum is compiled, and torch does the rest."""
    used: list[Kind] = []
    step = Library.step

    def spy(self: Library, *args: object, **kwargs: object) -> float:
        formula = args[4]
        assert isinstance(formula, Formula)
        used.append(formula.kind)
        return step(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Library, "step", spy)
    mine, theirs = state_of(5000, optimizer), state_of(5000, optimizer)
    one = other = numbers(99, mine.chunk.elements)
    for number in range(4):
        parts = [((slice_, slice_ + 1), numbers(10 * number + slice_, one.numel())) for slice_ in range(3)]
        one = mine.step(one, Sum(parts, 3, 96.0), {0}, hypers)
        assert used.pop() is (kind if kind in all_kinds() else Kind.COPY)
        with torch_only():
            other = theirs.step(other, Sum(parts, 3, 96.0), {0}, hypers)
        assert not used
        assert bits(one) == bits(other)
    for (*_, key, _, array, _), (*_, same, _, expected, _) in zip(mine.export(), theirs.export(), strict=True):
        assert key == same
        assert torch.equal(array, expected)


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_that_rounds_otherwise_than_torch_is_left_to_torch(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    step, before = Library.step, all_kinds()

    def rounding_otherwise(self: Library, *args: object) -> float:
        seen = step(self, *args)  # type: ignore[arg-type]
        formula, out = args[4], args[6]
        assert isinstance(formula, Formula)
        assert isinstance(out, torch.Tensor)
        if formula.kind is kind:
            out[7] *= 1 + 2**-22
        return seen

    monkeypatch.setattr(Library, "step", rounding_otherwise)
    monkeypatch.setattr(compiled, "_examined", compiled._examined.__wrapped__)
    found = compiled._examined()
    if before == {kind}:
        assert found == "compiled, but torch rounds otherwise on this processor"
        return
    assert isinstance(found, Compiled)
    assert found.kinds == before - {kind}
    one = torch.ones(8)
    assert all(found.can(Formula(other), [one, one], ((0, 1, 2),)) is (other in before - {kind}) for other in Kind)


def test_what_they_cannot_do_is_left_to_torch() -> None:
    found = compiled.kernels()
    assert found is not None
    one = torch.ones(8)
    assert not found.can(COPY, [one.double()], ())
    assert not found.can(COPY, [torch.ones(16)[::2]], ())
    assert found.can(COPY, [one] * library.ROWS, ())
    assert not found.can(COPY, [one] * (library.ROWS + 1), ())
    assert found.can(COPY, [one, one], ((0, 1, 1 + library.PLACES),))
    assert not found.can(COPY, [one, one], ((0, 1, 2 + library.PLACES),))


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (Imported(version="compiled: adam, add, copy, sgd"), Level.OK, "adam"),
        (Imported(version="not built: there was no C compiler"), Level.NOTE, "twice as long"),
        (Imported(error="ModuleNotFoundError: torch"), Level.NOTE, "not looked at"),
    ],
)
def test_doctor_tells(found: Imported, level: Level, words: str) -> None:
    finding = check_kernels(found)
    assert finding.level is level
    assert words in finding.value
