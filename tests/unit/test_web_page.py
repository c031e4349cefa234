"""The files of the page."""

from __future__ import annotations

import re

from paramserver.web.page.files import STATIC


def test_all_files_of_the_page_are_there_with_the_licence_and_in_150_kb() -> None:
    page = (STATIC / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="/static/([\w.]+)"', page))
    there = {path.name for path in STATIC.iterdir()}
    assert there == named | {"index.html", "uplot.LICENSE.txt"}
    assert sum(len((STATIC / name).read_bytes()) for name in [*named, "index.html"]) < 110_000
    assert "Leon Sorokin" in (STATIC / "uplot.LICENSE.txt").read_text()


def test_no_text_of_the_job_is_taken_for_markup() -> None:
    """Also style attributes, which the policy of the page forbids."""
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|setAttribute\(\"style|cssText"
    )
    for path in STATIC.glob("*.js"):
        if path.name != "uplot.js":
            assert not forbidden.search(path.read_text()), path.name
