"""The computed table of docs/finetune.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.seven import GIB, adapters, needs, parameters, table


def test_the_page_has_the_table_that_the_command_prints() -> None:
    page = Path(__file__).parents[2] / "docs" / "finetune.md"
    assert table() in page.read_text()


def test_numbers_that_are_known() -> None:
    """Llama 2 7B has 6,738,415,616 parameters; rank 16 on queries and values has 8,388,608."""
    assert (parameters(), adapters()) == (6_738_415_616, 8_388_608)
    found = needs()
    assert found["FSDP, ZeRO 3"][0] == found["DDP"][0] / 4
    assert found["paramserver, LoRA"][2] / GIB == 8 * 8_388_608 / 2**30
