"""The files of the page, and the page as one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from paramserver.web.page.files import STATIC, one_file
from tests.support.documents import document

MARKUP = "</script><img src=x onerror=document.title='owned'><!--"


def test_a_file_has_all_inside_and_allows_no_other_script() -> None:
    page = one_file(document("worker-0"), "job <digits>", more="<h2>Digests</h2>")
    assert "<title>job &lt;digits&gt;</title>" in page
    assert '<div id="more"><h2>Digests</h2></div>' in page
    assert not re.search(r'(src|href)="', page)
    inside = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", page, re.DOTALL)
    digests = {f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in inside}
    assert len(inside) == 8
    assert digests == set(re.findall(r"'sha256-[^']+'", page))
    assert "unsafe" not in page.partition("</head>")[0].partition("Content-Security-Policy")[2][:1000]


def test_markup_in_the_data_does_not_end_the_element() -> None:
    page = one_file(document(MARKUP), "job")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data)["status"]["processes"][0]["name"] == MARKUP
    assert "<img" not in page


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
