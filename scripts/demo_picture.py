"""Take docs/images/demo.svg: a real run of `tenure demo` on a terminal. Run by hand; it takes about half a minute.

It shows the screen near the end of the run, and below it the last line of the report: the rest of that is left out.
"""

from __future__ import annotations

import argparse
import io
import socket
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.terminal import LEAVE, Terminal  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "demo.svg"
WIDTH, HEIGHT = 96, 28
"""The size of the terminal; the end of the report adds three lines to the picture."""
SHOWN = (
    "a worker, was killed",
    "the leader, was killed",
    "leading, term ",  # the terms are 1 and 2, unless the machine was so slow that a leader lost its lease
    "a late write under term ",
    "was dead-lettered",
)
"""What the screen must show: both kills, the next leader, the fate of a late write and of the failing message."""
DONE = "✓"

FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""The form of the picture: that of rich without the font, which it would load from another server."""


def run_demo(folder: str | None) -> str:
    """Run the demonstration; return what to show, with the escape sequences of the terminal."""
    arguments = [] if folder is None else ["--input", folder]
    with Terminal("demo", *arguments, width=WIDTH, height=HEIGHT) as terminal:
        if code := terminal.wait():
            raise SystemExit(f"tenure demo has failed with {code}:\n{terminal.after}")
        screen = terminal.until_shown(*SHOWN)
        report = terminal.raw.rpartition(LEAVE)[2].rstrip().split("\n")
    last = next(place for place, line in enumerate(report) if DONE in line)
    return "\n".join([screen, "", *report[last:]])


def draw(shown: str, title: str = "tenure demo") -> str:
    """Return a picture of a terminal in SVG."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in [*shown.split("\n"), ""]:  # rich leaves too little room below the last line
        text = Text.from_ansi(line)
        text.rstrip()
        console.print(text, soft_wrap=True)
    picture = console.export_svg(title=title, theme=SVG_EXPORT_THEME, code_format=FORMAT, unique_id="demo")
    return "\n".join(line.strip() for line in picture.splitlines() if line.strip()) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--input", metavar="DIR", help="the folder to count (default: as tenure demo)")
    arguments.add_argument("--output", metavar="FILE", type=Path, default=PICTURE)
    given = arguments.parse_args()
    shown = run_demo(given.input)
    for private in (f"{Path.home()}/", f"{ROOT}/", f"{socket.gethostname()}-"):  # a holder begins with the host
        if private != "//" and private in shown:
            raise SystemExit(f"the picture would show {private!r}, which is of this machine only")
    given.output.write_text(draw(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
