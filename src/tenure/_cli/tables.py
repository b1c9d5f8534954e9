"""Tables for terminals: aligned, with coloured cells, and cut if the terminal is too narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from tenure._cli.output import TITLE, Cell, ellipsis
from tenure._one_line import one_line

GAP = "  "

LEAST = 8
"""The least width of a column that is cut."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its title.
        numbers: Whether it is aligned to the right.
        is_cut: Whether its cells are cut if there is too little room; others keep their width.
    """

    title: str
    numbers: bool = False
    is_cut: bool = False


Row = Sequence[str | Cell]


def laid_out(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[Text]:
    """Return the lines of a table, the titles first; columns with ``is_cut`` are cut to fit into *width* cells."""
    cells = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in rows]
    shown = [[Cell(one_line(cell.text), cell.style) for cell in row] for row in cells]
    titles = [Cell(column.title, TITLE) for column in columns]
    widths = _widths(columns, [titles, *shown], width)
    return [_line(columns, row, widths) for row in [titles, *shown]]


def cut(text: str, width: int) -> str:
    """Return *text* in *width* cells at most; the rest is shown as three dots."""
    if cell_len(text) <= width:
        return text
    dots = ellipsis()
    return set_cell_size(text, max(0, width - len(dots))).rstrip() + dots[:width]


def _widths(columns: Sequence[Column], lines: Sequence[Sequence[Cell]], width: int) -> list[int]:
    """Return the width of each column: as wide as its widest cell, unless the table must be narrower."""
    widths = [max(cell_len(line[place].text) for line in lines) for place in range(len(columns))]
    too_much = sum(widths) + len(GAP) * (len(columns) - 1) - width
    while too_much > 0:
        wide = [place for place, column in enumerate(columns) if column.is_cut and widths[place] > LEAST]
        if not wide:
            break
        widest = max(wide, key=lambda place: widths[place])
        widths[widest] -= 1
        too_much -= 1
    return widths


def _line(columns: Sequence[Column], cells: Sequence[Cell], widths: Sequence[int]) -> Text:
    line = Text()
    for place, (column, cell, room) in enumerate(zip(columns, cells, widths, strict=True)):
        text = cut(cell.text, room)
        space = " " * (room - cell_len(text))
        if column.numbers:
            line.append(space)
        line.append(text, cell.style)
        if place < len(columns) - 1:
            line.append(GAP if column.numbers else space + GAP)
    return line
