"""Tables for terminals: aligned for all letters, and never too wide if columns can be cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tenure._cli.output import Cell
from tenure._cli.tables import LEAST, Column, cut, laid_out

COLUMNS = (Column("NAME", is_cut=True), Column("COUNT", numbers=True), Column("NOTE", is_cut=True))


def test_columns_are_aligned() -> None:
    rows: list[tuple[str | Cell, ...]] = [
        ("orders", "12", "x"),
        ("名前", Cell("7", "red"), ""),
        ("a\tb", "1234567", "y"),
    ]
    assert [line.plain for line in laid_out(COLUMNS, rows, 80)] == [
        "NAME      COUNT  NOTE",
        "orders       12  x",
        "名前          7  ",
        "a\\tb    1234567  y",
    ]


@given(st.lists(st.tuples(st.text(max_size=60), st.text(max_size=9), st.text(max_size=60))), st.integers(40, 90))
def test_columns_that_can_be_cut_fit(rows: list[tuple[str, str, str]], width: int) -> None:
    lines = laid_out(COLUMNS, [(name, "1" * len(count), note) for name, count, note in rows], width)
    assert len(lines) == len(rows) + 1
    assert max(cell_len(line.plain) for line in lines) <= width
    assert "\n" not in "".join(line.plain for line in lines)


@pytest.mark.parametrize(("width", "shown"), [(9, "名前名前…"), (10, "名前名前名"), (2, "…"), (1, "…"), (0, "")])
def test_a_text_is_cut_between_letters(width: int, shown: str) -> None:
    assert cut("名前名前名", width) == shown


def test_a_cut_column_keeps_its_minimum() -> None:
    [_, row] = laid_out(COLUMNS, [("n" * 50, "1", "m" * 50)], 5)
    assert row.plain == f"{'n' * (LEAST - 1)}…      1  {'m' * (LEAST - 1)}…"
