"""Text from outside on a terminal and in a spreadsheet."""

import pytest

from hpc.base.text import csv_cell, csv_text, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\nb\rc\x00\x7f", r"a\nb\rc\x00\x7f"),
        ("\x9b2J", r"\x9b2J"),
        ("safe\u202eexe.txt\u2066", r"safe\u202eexe.txt\u2066"),
        ("\udcff", r"\udcff"),
        ("tab\tand Größe, 図, 😀", "tab\tand Größe, 図, 😀"),
    ],
)
def test_control_characters_are_seen(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''-1"])
def test_text_that_would_be_a_formula_is_escaped_and_read_back(text: str) -> None:
    assert csv_cell(text) == "'" + text
    assert csv_text(f"'{text}") == text


@pytest.mark.parametrize("cell", ["cat", "", "a=b", "'quoted'", 5, -5, -0.5, None])
def test_other_cells_stay(cell: object) -> None:
    assert csv_cell(cell) == cell
    if isinstance(cell, str):
        assert csv_text(cell) == cell
