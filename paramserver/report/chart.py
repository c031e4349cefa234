"""Curves and bars as SVG, drawn by Python: no script, nothing to load. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

# Of a curve, and of a chart of bars, which is as wide as the page.
WIDTH, HEIGHT, WIDE = 520, 190, 1000
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 18, 30
# A curve is drawn with so many points at most.
_MOST = 400
# From so many points on, a smooth curve is drawn over a pale one.
_NOISY = 60

Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A vertical line with a number above, at an event."""

    x: float
    number: str
    text: str


def curve(points: Sequence[Place], x_label: str, lines: Sequence[Line] = (), zero: bool = False) -> Markup:
    """The curve through points in the order of x; empty if there are fewer than three finite ones.

    ``zero``: the axis of y begins at 0, or lower.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < 3:
        return Markup("")
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    left, right = xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1.0
    ticks = _ticks(min([0.0, *ys] if zero else ys), max(ys), 4)
    low, high = min(min(ys), ticks[0]), max(max(ys), ticks[-1])

    def at_x(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - low) / ((high - low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in ticks:
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in _ticks(left, right, 6):
        if left <= tick <= right:
            parts.append(
                f'<text class="tick" x="{at_x(tick):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{_short(tick)}</text>'
            )
    parts.append(
        Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            WIDTH - _RIGHT, HEIGHT - 2, x_label
        )
    )
    for line in _apart([line for line in lines if left <= line.x <= right], 14 * (right - left) / WIDTH):
        x = f"{at_x(line.x):.1f}"
        parts.append(
            Markup(
                '<g class="mark"><title>{}</title><line x1="{}" x2="{}" y1="{}" y2="{}"/>'
                '<text x="{}" y="{}" text-anchor="middle">{}</text></g>'
            ).format(line.text, x, x, _TOP, HEIGHT - _BOTTOM, x, _TOP - 5, line.number)
        )
    drawn = _thinned(points)
    noisy = len(finite) >= _NOISY
    parts.append(_path(drawn, at_x, at_y, "line pale" if noisy else "line"))
    if noisy:
        parts.append(_path(_thinned(_smooth(finite)), at_x, at_y, "line"))
    return _svg(WIDTH, HEIGHT, parts)


def _apart(lines: Sequence[Line], nearest: float) -> list[Line]:
    """Lines that lie closer than this become one line with all numbers."""
    kept: list[Line] = []
    for line in sorted(lines, key=lambda line: line.x):
        if kept and line.x - kept[-1].x < nearest:
            last = kept.pop()
            line = Line(last.x, f"{last.number},{line.number}", f"{last.text}\n{line.text}")
        kept.append(line)
    return kept


def _path(points: Sequence[Place], at_x: object, at_y: object, kind: str) -> str:
    """A path with a gap where a value is not finite."""
    assert callable(at_x)
    assert callable(at_y)
    words, drawing = [], False
    for x, y in points:
        if math.isfinite(y):
            words.append(f"{'L' if drawing else 'M'}{at_x(x):.1f} {at_y(y):.1f}")
        drawing = math.isfinite(y)
    return f'<path class="{kind}" d="{"".join(words)}"/>'


def _thinned(points: Sequence[Place]) -> list[Place]:
    """At most about ``_MOST`` points: of each group the lowest and the highest, so that no peak is lost."""
    if len(points) <= _MOST:
        return list(points)
    group = -(-2 * len(points) // _MOST)
    kept: list[Place] = []
    for begin in range(0, len(points), group):
        some = points[begin : begin + group]
        finite = [point for point in some if math.isfinite(point[1])]
        if not finite:
            kept.append(some[0])
            continue
        kept += sorted({min(finite, key=_value), max(finite, key=_value)})
    return kept


def _smooth(points: Sequence[Place]) -> list[Place]:
    """The mean over the neighbours of each point."""
    reach = max(2, len(points) // 40)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    smooth = []
    for place, (x, _) in enumerate(points):
        near = min(reach, place, len(points) - 1 - place)
        smooth.append((x, (sums[place + near + 1] - sums[place - near]) / (2 * near + 1)))
    return smooth


def _value(point: Place) -> float:
    return point[1]


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between the two, about so many.

    >>> _ticks(0.13, 2.2, 4)
    [0.5, 1.0, 1.5, 2.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """A number at an axis: "0.5", "12k", "3M"."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{value:.4g}"


def _svg(width: int, height: float, parts: Sequence[str]) -> Markup:
    return Markup(f'<svg viewBox="0 0 {width} {height:g}" aria-hidden="true">{"".join(parts)}</svg>')


# ---- bars


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a chart of bars: from ``begin`` to ``end`` in one colour; ``kind`` is a class of the style sheet."""

    begin: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """Bars of one name, and crosses where something broke."""

    name: str
    bars: Sequence[Bar]
    crosses: Sequence[Line] = ()


_ROW, _NAMES = 22, 110


def bars(rows: Sequence[Row], until: float, unit: str) -> Markup:
    """Rows of bars on one axis from 0 to ``until``; empty if there is nothing to draw."""
    if not rows or until <= 0:
        return Markup("")

    def at(x: float) -> float:
        return _NAMES + min(1.0, max(0.0, x / until)) * (WIDE - _NAMES - 2 * _RIGHT)

    height = _TOP + _ROW * len(rows) + 20
    parts: list[str] = []
    for tick in _ticks(0.0, until, 6):
        x = f"{at(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{height - 18}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{height - 5}" text-anchor="middle">{_short(tick)} {unit}</text>')
    for place, row in enumerate(rows):
        y = _TOP + _ROW * place
        name = row.name if len(row.name) <= 16 else f"{row.name[:15]}…"
        parts.append(
            Markup('<text class="name" x="{}" y="{}" text-anchor="end">{}<title>{}</title></text>').format(
                _NAMES - 8, y + 14, name, row.name
            )
        )
        for bar in row.bars:
            left, right = at(bar.begin), at(bar.end)
            parts.append(
                Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
                    bar.kind, f"{left:.1f}", y + 3, f"{max(0.8, right - left):.1f}", _ROW - 7, bar.text
                )
            )
        for cross in row.crosses:
            x = f"{at(cross.x):.1f}"
            parts.append(
                Markup(
                    '<g class="cross"><title>{}</title><path d="M{} {}m-5 -5l10 10m0 -10l-10 10"/>'
                    '<text x="{}" y="{}" text-anchor="middle">{}</text></g>'
                ).format(cross.text, x, y + 10, x, y - 1 if place else _TOP - 4, cross.number)
            )
    return _svg(WIDE, height, parts)
