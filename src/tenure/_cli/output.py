"""Output: a line on stderr for an error, a warning or a notice; tables for people, JSON for programs."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from tenure._one_line import indented, one_line

if TYPE_CHECKING:
    from types import TracebackType

    from tenure import DeadMessage, Leader, LiveMessage, Stats

NO_LEADER = "(none)"

_MOMENTS = frozenset({"enqueued_at", "locked_since", "locked_until", "due_at", "dead_at"})
"""The fields of a message that are Unix seconds."""

_HOLDER = re.compile(r"(?P<label>.+)-(?P<random>[0-9a-f]{32})(?P<count>#\d+)?", re.DOTALL)

_IDENTITY = re.compile(r"(?P<label>.+)-(?P<random>[0-9a-f]{16})", re.DOTALL)

_NOT_ASCII = re.compile(r"[^ -~\n]+")
"""Text in the output of ``json.dumps`` that is not ASCII, or DEL; line ends are between values only."""

_COLOURS = {"error": "1;31", "warning": "33"}  # red, bold; yellow


def print_error(message: str) -> None:
    """Print an error on stderr, in one line: ``tenure: error: …``."""
    _print_message("error", message)


def warn(message: str) -> None:
    """Print a warning on stderr, in one line: ``tenure: warning: …``. The command goes on."""
    _print_message("warning", message)


def notice(message: str) -> None:
    """Print the progress of the command on stderr, in one line: ``tenure: …``."""
    _print_message("", message)


def lead_on(code: str) -> None:
    """After an error on a terminal, print the command that says more about it; a log has one line for an error."""
    with suppress(AttributeError, OSError, ValueError):
        if code and sys.stderr.isatty():
            _write(f"{_coloured('2', f'tenure: more: tenure explain {code}')}\n")


def _print_message(kind: str, message: str) -> None:
    line = one_line(" ".join(message.split()))
    when = f"{timestamp()} " if _log_lines.timed else ""
    with suppress(AttributeError, OSError, ValueError):  # stderr is closed or absent, or its reader has ended
        _write(f"tenure: {_marked(kind)}{when}{line}\n")


def _write(text: str) -> None:
    if _redirected is not None and _redirected(text):
        return
    sys.stderr.write(text)
    sys.stderr.flush()


_redirected: Callable[[str], bool] | None = None
"""Writes to stderr instead of us, and returns whether it could; callable from any thread."""


@contextmanager
def stderr_written_by(write: Callable[[str], bool]) -> Iterator[None]:
    """Inside this block, pass lines for stderr to *write*: an event loop must not wait for the reader of stderr."""
    global _redirected
    _redirected = write
    try:
        yield
    finally:
        _redirected = None


def _marked(kind: str) -> str:
    """Return the prefix of this kind of line, in colour on a terminal."""
    if not kind:
        return ""
    return f"{_coloured(_COLOURS[kind], f'{kind}:')} "


def _coloured(colour: str, text: str) -> str:
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb":
        return f"\x1b[{colour}m{text}\x1b[0m"
    return text


def end_line() -> None:
    """End the line on which a terminal shows the ^C of an interrupt, so that the next text begins a new one."""
    if sys.stderr.isatty():
        sys.stderr.write("\n")


def print_line(line: str) -> None:
    """Write one line of the result."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def print_json(value: Any, *, lines: bool = False) -> None:
    """Write a value for programs: *lines* keeps it on one line of its own.

    Characters that are not printable are escaped, also where JSON would allow them: the output may go to a terminal.
    """
    indent = None if lines else 2
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    text = _NOT_ASCII.sub(_json_escaped, text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a file's name, metadata or the terminal is not UTF-8
        text = json.dumps(value, indent=indent, default=str)
    print_line(text)


def _json_escaped(found: re.Match[str]) -> str:
    text = found[0]
    return text if text.isprintable() else json.dumps(text)[1:-1]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, with a style of rich for terminals, such as red or bold green."""

    text: str
    style: str = ""


ALARM, LEADING, QUIET, TITLE = "red", "green", "dim", "bold"
"""Styles: named colours, which each terminal shows readably on its background."""


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    *,
    titles: bool = True,
    numbers: Container[str] = (),
    whole: Container[str] = (),
) -> None:
    """Print a table; if the output is not a terminal, no line is cut or wrapped.

    Args:
        columns: Their titles.
        rows: The cells of each row.
        titles: Whether the titles are shown.
        numbers: The titles of columns that are aligned to the right.
        whole: The titles of columns that are not wrapped, even on a narrow terminal.
    """
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    shown = [[Cell(one_line(cell.text), cell.style) for cell in row] for row in cells]
    if not sys.stdout.isatty():
        plain = [[cell.text for cell in row] for row in shown]
        lines = [list(columns), *plain] if titles else plain
        widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
        places = [(width, title in numbers) for title, width in zip(columns, widths, strict=True)]
        for line in lines:
            placed = zip(line, places, strict=True)
            print_line(
                "  ".join(cell.rjust(room) if right else cell.ljust(room) for cell, (room, right) in placed).rstrip()
            )
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=titles, header_style=TITLE, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        is_number = column in numbers
        justify: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(column, overflow="fold", no_wrap=is_number or column in whole, justify=justify)
    for row in shown:
        table.add_row(*(Text(cell.text, cell.style) for cell in row))  # Text: a name may look like markup
    Console(file=sys.stdout, highlight=False).print(table)


def short(holder: str) -> str:
    """Return *holder* with only the first characters of its random part, which distinguish candidates of one label."""
    found = _HOLDER.fullmatch(holder)
    return f"{found['label']}-{found['random'][:4]}{ellipsis()}{found['count'] or ''}" if found else holder


def short_identity(identity: str) -> str:
    """Return the identity of a member of a group with only the first characters of its random part."""
    found = _IDENTITY.fullmatch(identity)
    return f"{found['label']}-{found['random'][:4]}{ellipsis()}" if found else identity


def ellipsis() -> str:
    """Return three dots as standard output can show them."""
    try:
        "…".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "..."
    return "…"


def seconds(duration: float | None) -> str:
    """Write a duration for people."""
    if duration is None:
        return "unknown"
    if duration < 0.1:
        return f"{duration * 1000:.3g} ms"
    return f"{duration:.1f} s" if duration < 100 else f"{duration:.0f} s"


def pairs(metadata: Mapping[str, str]) -> str:
    """Write metadata for people."""
    return " ".join(f"{key}={value}" for key, value in metadata.items())


def record(name: str, leader: Leader | None) -> dict[str, Any]:
    """Return a name and its leader for JSON; the fields of a vacant name are null."""
    return {
        "name": name,
        "leader": leader.holder if leader else None,
        "token": leader.token if leader else None,
        "remaining": leader.remaining if leader else None,
        "metadata": dict(leader.metadata) if leader else {},
    }


def timestamp(moment: float | None = None, timespec: Literal["milliseconds", "seconds"] = "milliseconds") -> str:
    """Write a moment (Unix seconds; now, if none is given) as every command does: ISO 8601 in UTC.

    For display only.
    """
    when = datetime.now(UTC) if moment is None else datetime.fromtimestamp(moment, UTC)
    return when.isoformat(timespec=timespec)


def count_cells(stats: Stats) -> tuple[str | Cell, ...]:
    """Return the counts of a queue, the age of its oldest ready message, and whether it is paused, for people."""
    counts = (stats.ready, stats.locked, stats.delayed, stats.deferred)
    dead = Cell(str(stats.dead), ALARM if stats.dead else "")
    oldest = seconds(stats.oldest_age) if stats.ready else ""
    return (*map(str, counts), dead, Cell(f"{oldest} paused".strip(), ALARM) if stats.paused else oldest)


def body_fields(body: bytes) -> dict[str, str]:
    """Return the body of a message for programs, and how it is written: ``body_encoding`` is utf-8 or base64."""
    try:
        return {"body": body.decode(), "body_encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"body": base64.b64encode(body).decode(), "body_encoding": "base64"}


def message_fields(one: LiveMessage | DeadMessage) -> dict[str, Any]:
    """Return a message for programs: the body with its encoding, moments in ISO 8601."""
    from dataclasses import fields

    shown: dict[str, Any] = {}
    for field in fields(one):
        value = getattr(one, field.name)
        if field.name == "body":
            shown |= body_fields(value)
        elif field.name in _MOMENTS and value is not None:
            shown[field.name] = timestamp(value)
        else:
            shown[field.name] = value
    return {**shown, "headers": dict(one.headers)}


def body_text(body: bytes) -> str:
    """Write the body of a message for people: as its text, or in base64 with a note."""
    fields = body_fields(body)
    return fields["body"] if fields["body_encoding"] == "utf-8" else f"{fields['body']} (base64, {len(body):,} bytes)"


def print_traceback(error: BaseException | None, trace: TracebackType | None) -> None:
    """Print an exception of the user's code with its traceback *trace*, indented: a line of its text is none of ours.

    *trace* begins with the user's own frames; that of the exception begins with those of tenure.
    """
    from traceback import format_exception

    with suppress(Exception):  # stderr as above; and the exception's own code, which makes its text
        _write(f"{indented(''.join(format_exception(type(error) if error else None, error, trace)))}\n")


class _LogLines(logging.Handler):
    """Writes log records as lines on stderr; a line that equals the one before is dropped, as during an outage."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""
        self.timed = False
        """Whether each line begins with the time."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # its arguments don't fit, or one can't be printed
            self.handleError(record)
            return
        if message != self._last:
            self._last = message
            kind = (
                "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else ""
            )
            _print_message(kind, message)
            if record.exc_info:
                print_traceback(*record.exc_info[1:])


_log_lines = _LogLines()


def log_to_stderr(verbosity: int) -> None:
    """Write the log of tenure to stderr: -1 errors only, 0 warnings, 1 all events, with the time, 2 every renewal."""
    levels = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}
    global _log_lines
    _log_lines = _LogLines()
    _log_lines.timed = verbosity > 0
    logger = logging.getLogger("tenure")
    logger.handlers = [_log_lines]
    logger.propagate = False
    logger.setLevel(levels.get(verbosity, logging.DEBUG))
