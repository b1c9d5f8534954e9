"""Draw a picture as SVG: boxes, lines, arrows and texts on a light card. The same calls give the same text.

Pictures are 560 units wide, and as many pixels on a page with room for them; texts of 14 units stay legible on a phone.
The card has a background of its own, so that it is right on light and on dark pages. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

WIDTH = 560.0
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
SMALL, NORMAL = 14.0, 15.0
LETTER = 0.56
"""The width of a letter, as a share of the size of the font; of a wide font, on average."""

INK, GREY, RULE, PALE = "#1f2933", "#52606d", "#9aa5b1", "#e4e7eb"
BLUE, ORANGE, RED, GREEN, PURPLE = "#1d5fa8", "#9a4a06", "#b42318", "#1b6e43", "#6b3fa0"
LIGHT = {BLUE: "#d3e4f6", ORANGE: "#fbe0bf", RED: "#fbd9d5", GREEN: "#cfecd9", PURPLE: "#e6daf5", GREY: PALE}
"""The tone that fills a box with a border of this colour; every text is legible on it."""

Point = tuple[float, float]


class Drawing:
    """One picture.

    Args:
        title: What it shows, in a few words: for screen readers.
        description: The same in sentences.
        height: Of the card; its width is ``WIDTH``.
    """

    def __init__(self, title: str, description: str, height: float) -> None:
        self._title, self._description, self._height = title, description, height
        self._parts: list[str] = []
        self._texts: list[tuple[float, float, float, float, str]] = []

    def svg(self) -> str:
        """Return the picture.

        Raises:
            ValueError: A text is outside the card, or on another text, as far as letters can be measured here.
        """
        for left, top, right, bottom, text in self._texts:
            if left < 4 or top < 4 or right > WIDTH - 4 or bottom > self._height - 4:
                raise ValueError(f"{self._title}: {text!r} is not inside the card")
        for one, other in itertools.combinations(self._texts, 2):
            if one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]:
                raise ValueError(f"{self._title}: {one[4]!r} and {other[4]!r} overlap")
        size = f'width="{_n(WIDTH)}" height="{_n(self._height)}" viewBox="0 0 {_n(WIDTH)} {_n(self._height)}"'
        card = f'width="{_n(WIDTH - 1)}" height="{_n(self._height - 1)}" rx="10" fill="#fcfcfb" stroke="#cbd2d9"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(self._title)}</title>',
            f'<desc id="desc">{escape(self._description)}</desc>',
            f'<rect x="0.5" y="0.5" {card}/>',
            f'<g font-family="{FONT}" fill="none" stroke-linejoin="round">',
            *self._parts,
            "</g>",
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def box(
        self,
        left: float,
        top: float,
        right: float,
        bottom: float,
        color: str,
        *,
        open_: bool = False,
        round_: float = 4,
    ) -> None:
        """Draw a rectangle, filled with the light tone of *color*; an open one has a broken border and no filling."""
        look = 'stroke-dasharray="5 4"' if open_ else f'fill="{LIGHT[color]}"'
        place = f'x="{_n(left)}" y="{_n(top)}" width="{_n(right - left)}" height="{_n(bottom - top)}"'
        self._parts.append(f'<rect {place} rx="{_n(round_)}" stroke="{color}" stroke-width="1.5" {look}/>')

    def line(
        self, *points: Point, color: str = RULE, width: float = 1.5, broken: bool = False, arrow: bool = False
    ) -> None:
        """Draw straight lines from point to point; with an arrow, they end in its head."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if broken else ""
        self._parts.append(f'<polyline points="{path}" stroke="{color}" stroke-width="{_n(width)}"{dashes}/>')
        if arrow:
            self._head(points[-2], points[-1], color)

    def _head(self, before: Point, tip: Point, color: str) -> None:
        angle = math.atan2(tip[1] - before[1], tip[0] - before[0])
        corners = [tip] + [
            (tip[0] - 10 * math.cos(angle + turn), tip[1] - 10 * math.sin(angle + turn)) for turn in (0.4, -0.4)
        ]
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
        self._parts.append(f'<polygon points="{path}" fill="{color}"/>')

    def dot(self, x: float, y: float, color: str, *, open_: bool = False) -> None:
        """Draw a dot; an open one is a ring."""
        fill = "#fcfcfb" if open_ else color
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="5" fill="{fill}" stroke="{color}" stroke-width="2"/>')

    def cross(self, x: float, y: float, color: str) -> None:
        """Draw a cross: something that failed."""
        for x1, x2 in ((x - 5, x + 5), (x + 5, x - 5)):
            self.line((x1, y - 5), (x2, y + 5), color=color, width=2.5)

    def text(
        self, x: float, y: float, text: str, *, at: str = "start", color: str = INK, size: float = SMALL,
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Write *text* on the base line *y*; further lines follow below. *at* *x* it has its start, middle or end."""
        for number, line in enumerate(text.split("\n")):
            base, wide = y + number * size * 1.25, len(line) * size * LETTER * (1.06 if bold else 1)
            left = x - {"start": 0, "middle": wide / 2, "end": wide}[at]
            self._texts.append((left, base - size * 0.8, left + wide, base + size * 0.2, line))
            anchor = "" if at == "start" else f' text-anchor="{at}"'
            weight = ' font-weight="600"' if bold else ""
            place = f'x="{_n(x)}" y="{_n(base)}" font-size="{_n(size)}"'
            self._parts.append(f'<text {place}{anchor}{weight} fill="{color}">{escape(line, quote=False)}</text>')

    def labelled(self, x: float, y: float, text: str, color: str, *, wide: float, high: float = 38) -> None:
        """Draw a box around the point *x*, *y*, and write *text* into it."""
        self.box(x - wide / 2, y - high / 2, x + wide / 2, y + high / 2, color, round_=8)
        self.text(x, y + NORMAL * 0.35, text, at="middle", color=color, size=NORMAL, bold=True)

    def axis(self, xs: Sequence[tuple[float, str]], y: float) -> None:
        """Draw a line of time with ticks, each with its text below."""
        self.line((xs[0][0], y), (xs[-1][0], y), color=GREY)
        for x, text in xs:
            self.line((x, y), (x, y + 5), color=GREY)
            self.text(x, y + 20, text, at="middle", color=GREY)


def _n(value: float) -> str:
    """Return a number with one digit after the point at most; so all machines write the same."""
    return f"{round(value, 1) + 0.0:g}"
