"""The page of errors, exit codes and warnings as data: errors.md beside this file, of which docs/errors.md is a copy.

Each section has a heading of the third level with a code, and begins with a sentence of its own paragraph.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from tenure._cli.exits import Exit

FILE = "errors.md"
HOME = "../../../"
"""The way from the folder of the page to that of the repository, with which its links begin."""

SIGNAL, CODE_MAX = int(Exit.SIGNAL), 255
"""From where on an exit code is that of a signal, and up to where."""

_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
_CODE = re.compile(r"`[^`]+`")
_JOINT = "\x00"
"""Stands for a space at which no line may end."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page: its code, the title of the part that it stands in, and its text in Markdown."""

    code: str
    part: str
    text: str

    @property
    def summary(self) -> str:
        """Its first paragraph, in one line."""
        return plain(self.text.partition("\n\n")[0])


@cache
def sections() -> dict[str, Section]:
    """Return all sections by their codes, in the order of the page."""
    found: dict[str, Section] = {}
    part = ""
    page = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    for piece in re.split(r"^(?=##)", page, flags=re.MULTILINE)[1:]:
        title, _, text = piece.partition("\n")
        level, _, title = title.partition(" ")
        title = title.strip("`")
        if level == "##":
            part = title
        else:
            found[title] = Section(title, part, text.strip())
    return found


def code_of(asked: str) -> str:
    """Return the code that *asked* means: a code, an exit code, or the name of an error, an event or a reason."""
    asked = asked.strip()
    if asked.isascii() and asked.isdecimal() and len(asked) <= len(str(CODE_MAX)):
        code = int(asked)
        return f"exit-{SIGNAL if SIGNAL < code <= CODE_MAX else code}"
    name = asked.strip("[]:. ").partition(":")[0].rpartition(".")[2]
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[_ ]", "-", name).lower()


def plain(markdown: str) -> str:
    """Return a paragraph in one line, with each link as its text and, if that is another page, its address."""

    def shown(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        return text if target.startswith("#") else f"{text} ({target.removeprefix(HOME)})"

    return _LINK.sub(shown, " ".join(markdown.split()))


def lines_of(section: Section, width: int) -> Iterator[str]:
    """Yield the lines of a *section* for a terminal of so many columns; no line of a block of code is wrapped."""
    yield section.code
    for paragraph in re.split(r"\n\n(?!  )", section.text):
        yield ""
        if paragraph.startswith("```"):
            yield from (f"    {line}".rstrip() for line in paragraph.splitlines()[1:-1])
        elif paragraph.startswith("- "):
            for item in re.split(r"\n(?=- )", paragraph):
                yield from _wrapped(item.replace("**", ""), width, "  ")
        else:
            yield from _wrapped(paragraph.replace("**", ""), width)


def _wrapped(paragraph: str, width: int, indent: str = "") -> Iterator[str]:
    whole = _CODE.sub(lambda found: found[0].replace(" ", _JOINT), plain(paragraph))  # a command stays on one line
    for line in textwrap.wrap(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False):
        yield line.replace(_JOINT, " ")
