"""The page of commands holds what the code says: every command and every option, in tables that Markdown reads."""

from __future__ import annotations

from option_tables import PAGE, page


def test_the_page_is_not_stale() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run .venv/bin/python scripts/setup/option_tables.py"


def test_every_row_has_the_cells_of_its_table() -> None:
    cells = 0
    for line in page(PAGE.read_text(encoding="utf-8")).splitlines():
        if line.startswith("|"):
            bars = line.count("|") - line.count("\\|")
            assert cells in (0, bars), line
            cells = bars
        else:
            cells = 0
