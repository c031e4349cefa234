"""The colours of the page and of reports can be told apart, also by colour-blind people; no state is a colour alone."""

from __future__ import annotations

import re
from itertools import combinations, product
from pathlib import Path

import pytest

import paramserver.report
from paramserver.web.page.files import STATIC
from tests.support.unit.colours import SEEN_BY, distance, simulated, variables

PAGE = STATIC / "page.css"
REPORT = Path(paramserver.report.__file__).with_name("page.css")
PHASES = ("data", "compute", "send", "waits", "receive", "other")
# CIE 1976. Areas of one colour that lie side by side are told apart well above 10.
FAR = 15.0


@pytest.mark.parametrize(("sheet", "eyes"), list(product((PAGE, REPORT), SEEN_BY)))
def test_the_colours_of_phases_are_far_apart(sheet: Path, eyes: str) -> None:
    for scheme in variables(sheet.read_text()):
        apart = {(a, b): distance(scheme[a], scheme[b], eyes) for a, b in combinations(PHASES, 2)}
        assert min(apart.values()) >= FAR, min(apart, key=lambda pair: apart[pair])


def test_the_page_and_reports_use_the_same_colours_for_phases() -> None:
    for page, report in zip(*(variables(sheet.read_text()) for sheet in (PAGE, REPORT)), strict=True):
        assert [page[name] for name in PHASES] == [report[name] for name in PHASES]


def test_the_simulation_knows_what_is_known() -> None:
    """Red and green that look alike to who lacks a kind of cone, and white that everybody sees as white."""
    assert distance("#b07000", "#748a00", "everybody else") > 25.0
    assert distance("#b07000", "#748a00", "deuteranopia") < 12.0
    for eyes in SEEN_BY:
        assert simulated("#fff", eyes) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)


def test_each_kind_of_state_has_a_symbol_of_its_own() -> None:
    """The symbol stands beside the word wherever a state has a colour."""
    symbols = re.search(
        r"const SYMBOLS = \{ well: \"(.)\", wait: \"(.)\", bad: \"(.)\" \};", (STATIC / "text.js").read_text()
    )
    assert symbols is not None
    assert len(set(symbols.groups())) == 3
