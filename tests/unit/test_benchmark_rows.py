"""What a benchmark makes of its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.rows import Row, rows, table, write

SECONDS = {"theirs": [4.0, 2.0, 3.0], "ours": [1.0, 1.5, 1.25]}


def test_a_row_has_the_median_the_spread_and_the_ratio() -> None:
    assert rows("speed", "uphill", SECONDS, "ours") == [
        Row("speed", "uphill", "theirs", 3.0, 2.0 / 3.0, 2.4),
        Row("speed", "uphill", "ours", 1.25, 0.4, 1.0),
    ]


def test_a_variant_that_was_never_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="ours was never measured"):
        rows("speed", "uphill", {"theirs": [1.0], "ours": []}, "ours")


def test_rows_are_written_for_people_and_for_programs(tmp_path: Path) -> None:
    found = rows("speed", "uphill", SECONDS, "ours")
    assert table(found).splitlines()[2].split() == ["speed", "uphill", "ours", "1250.0", "ms", "40%", "1.00"]
    path = tmp_path / "rows.json"
    write(path, found)
    assert json.loads(path.read_text())[1] == {
        "benchmark": "speed",
        "case": "uphill",
        "variant": "ours",
        "median_s": 1.25,
        "spread": 0.4,
        "ratio": 1.0,
    }
