"""How far apart two colours look, also to colour-blind people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Colour = tuple[float, float, float]
Matrix = tuple[Colour, Colour, Colour]

# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes: A Physiologically-based Model for Simulation of Color Vision
# Deficiency, 2009; severity 1.0, for linear RGB. Chromium's emulation uses the same.
SEEN_BY: Mapping[str, Matrix] = {
    "everybody else": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
# From linear RGB to XYZ, and the white of a screen (D65).
_XYZ: Matrix = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
_WHITE = (0.95047, 1.0, 1.08883)


def variables(css: str) -> tuple[dict[str, str], dict[str, str]]:
    """The colours of a style sheet by name: in the light, and in the dark, where they differ or not."""
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{3,6})", light))
    return found, found | dict(re.findall(r"--([a-z]+): (#[0-9a-f]{3,6})", dark))


def simulated(colour: str, eyes: str) -> Colour:
    """Linear RGB, each from 0 to 1, of "#rgb" or "#rrggbb" as these eyes see it."""
    digits = colour.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    linear = [_linear(int(digits[place : place + 2], 16) / 255) for place in (0, 2, 4)]
    red, green, blue = (min(1.0, max(0.0, value)) for value in _times(SEEN_BY[eyes], linear))
    return red, green, blue


def distance(one: str, other: str, eyes: str) -> float:
    """CIE 1976: 2 is just noticeable side by side, and 100 lies between black and white."""
    pairs = zip(_lab(simulated(one, eyes)), _lab(simulated(other, eyes)), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


def _times(matrix: Matrix, vector: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _lab(linear: Colour) -> Colour:
    x, y, z = (_root(value / white) for value, white in zip(_times(_XYZ, linear), _WHITE, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _root(value: float) -> float:
    return float(value ** (1 / 3)) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116
