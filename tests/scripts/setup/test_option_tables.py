"""The tables of options in the documentation, made from the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from option_tables import MODULES, on_page_markdown, option_table

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", MODULES)
def test_every_option_has_a_row(name: str) -> None:
    rows, frequent = option_table(name), option_table(name, frequent=True)
    assert len(rows) > 20
    assert all(row.count("|") - row.count("\\|") == 4 for row in rows)
    assert set(frequent) < set(rows)


def test_frequent_options_are_those_with_a_short_form() -> None:
    spellings = [row.split("|")[1].strip() for row in option_table("edge-run", frequent=True)[2:]]
    assert {"`--max-tokens`, `-n`", "`--draft-length`, `-d`", "`--threads`, `-t`"} <= set(spellings)
    assert all(spelling[-4:-2] == "`-" for spelling in spellings)


def test_the_first_page_and_the_page_of_commands_have_tables() -> None:
    first, commands = ((DOCS / name).read_text(encoding="utf-8") for name in ("index.md", "commands.md"))
    assert "| `--max-tokens`, `-n` | chat, generate," in on_page_markdown(first)
    made = on_page_markdown(commands)
    assert "<!--" not in made
    assert made.count("| option | of | what for |") == 3
