"""The displays: a live one for terminals, plain lines for everything else."""

from __future__ import annotations

from textwrap import wrap

from rich.console import Console
from rich.text import Text

from tenure._cli.live import Canvas
from tenure._cli.output import ALARM, LEADING, QUIET, TITLE, Cell, ellipsis
from tenure._cli.tables import Column, laid_out
from tenure._demo.state import InstanceState, RunState, State
from tenure._demo.summary import Summary
from tenure._one_line import one_line

EVENTS_LEAST = 6
"""Lines for the events, however many instances there are."""

BAR, BAR_LEAST = 40, 10

TITLES = 14
"""Characters of a title in the summary."""

PROBLEM, WELL = ALARM, LEADING

COLUMNS = (
    Column("instance"),
    Column("pid", numbers=True),
    Column("counted", numbers=True),
    Column("message"),
    Column("state"),
)

_STYLES: dict[State, str] = {
    "starting": "dim",
    "standing by": "",
    "leading": LEADING,
    "killed": ALARM,
    "ended": "dim",
    "failed": ALARM,
}


class LineDisplay:
    """Prints events line by line, and the progress at each quarter."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._quarter = 0

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def draw(self, run: RunState) -> None:
        """Print the progress when another quarter is done."""
        progress = run.progress
        quarter = 4 * progress.settled // progress.of
        if self._quarter < quarter < 4:
            self._quarter = quarter
            self.add_event(run.elapsed, f"{progress.settled:,} of {progress.of:,} messages are done")

    def add_event(self, at: float, text: str) -> None:
        """Print an event."""
        self._console.print(*_line(at, text, None), soft_wrap=True)


class LiveDisplay:
    """Draws the whole run, repeatedly, on the terminal's alternate screen; the last frame stays, with all events."""

    def __init__(self, console: Console) -> None:
        self._state_of_run: RunState | None = None
        self._canvas = Canvas(self._lines, console)

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._canvas.leave()

    def draw(self, run: RunState) -> None:
        """Draw the run."""
        self._state_of_run = run
        self._canvas.draw()

    def add_event(self, at: float, text: str) -> None:
        """Do nothing: the event is in the run's state, and drawn with it."""

    def stop(self) -> None:
        """Stop this process, with the normal screen shown, until the shell resumes it."""
        self._canvas.stop()

    def _lines(self, width: int, height: int | None) -> list[Text]:
        return _render(self._state_of_run, width, height) if self._state_of_run else []


def show_summary(console: Console, summary: Summary) -> None:
    """Print the summary and its problems; on a terminal, wrapped at words."""
    width = console.width if console.is_terminal else None
    console.print()
    for title, text in summary.rows():
        _print(console, Text(title.ljust(TITLES), TITLE), text, width)
    for problem in summary.problems():
        _print(console, Text("✗ ", PROBLEM), problem, width, PROBLEM)
    if not summary.problems():
        text = "a worker and the leader were killed, nothing was lost, nothing counted twice, and the result is right"
        _print(console, Text("✓ ", WELL), text, width, WELL)


def _print(console: Console, head: Text, text: str, width: int | None, style: str = "") -> None:
    for line in _wrapped(head, text, width, style):
        console.print(line, soft_wrap=True)


def _render(run: RunState, width: int, height: int | None) -> list[Text]:
    """Return the lines of the whole run; if *height* is given, with only the newest events, as many as fit."""
    state = Text.assemble(("tenure demo", TITLE), f"  election {run.election!r}: ", (_leader(run), TITLE))
    room = None if height is None else height - 7 - EVENTS_LEAST  # 7: the lines around the instances
    head = [state, Text(), *_instances(run, width, room), Text(), *_bars(run, width), Text()]
    events = [line for at, text in sorted(run.events) for line in _line(at, text, width)]
    if height is None:
        return [*head, *events]
    left = height - len(head)
    return [*head, *(events[-left:] if left > 0 else [])]


def _leader(run: RunState) -> str:
    for instance in run.instances:
        if instance.number == run.leader:
            role = "lease still held by the killed" if instance.state == "killed" else "led by"
            return f"{role} {instance.name}, term {run.token}"
    return "no leader"


def _instances(run: RunState, width: int, room: int | None) -> list[Text]:
    """Return a table of the instances; if there are more than fit, the most relevant."""
    shown = run.instances
    if room is not None and len(shown) > room:
        ranked = sorted(shown, key=lambda instance: instance.state not in ("leading", "killed", "failed"))
        kept = {instance.number for instance in ranked[: max(1, room - 1)]}
        shown = [instance for instance in shown if instance.number in kept]
    rows = [
        (
            str(instance.number),
            str(instance.pid),
            str(instance.counted),
            f"message {instance.chunk}" if instance.chunk else "",
            Cell(_state(instance, run), _STYLES[instance.state]),
        )
        for instance in shown
    ]
    table = laid_out(COLUMNS, rows, width)
    left_out = len(run.instances) - len(shown)
    return [*table, Text(f"{ellipsis()} and {left_out} more", QUIET)] if left_out else table


def _state(instance: InstanceState, run: RunState) -> str:
    if instance.state == "leading":
        return f"leading, term {instance.token}"
    if instance.state == "killed" and instance.number == run.leader:
        return f"killed; its lease (term {instance.token}) has not expired"
    return instance.state


def _bars(run: RunState, width: int) -> list[Text]:
    progress, queue, left = run.progress, run.queue, run.lease_left
    bars = [
        ("lease", run.ttl, left or 0.0, "time left unknown" if left is None else f"{left:.1f} s left"),
        (
            "work",
            progress.of,
            progress.settled,
            f"{progress.settled:,} of {progress.of:,} messages; plain run: {run.plain}",
        ),
        (
            "queue",
            progress.of,
            queue.ready,
            f"{queue.ready} ready, {queue.locked} locked, {queue.delayed} delayed, {queue.dead} dead",
        ),
    ]
    length = max(BAR_LEAST, min(BAR, width - 8 - max(len(text) for *_, text in bars)))
    return [Text.assemble(f"{title:<6}", _bar(of, done, length), f"  {text}") for title, of, done, text in bars]


def _bar(of: float, done: float, length: int) -> Text:
    full = round(length * min(of, done) / of) if of else 0
    on, off = "━─" if ellipsis() == "…" else "=-"
    return Text.assemble((on * full, LEADING), (off * (length - full), QUIET))


def _line(at: float, text: str, width: int | None) -> list[Text]:
    return _wrapped(Text(f"{at:6.2f} s  ", QUIET), text, width)


def _wrapped(head: Text, text: str, width: int | None, style: str = "") -> list[Text]:
    """Return *text* behind *head*, wrapped at words into *width* cells, below itself; without a width, in one line."""
    room = max(10, (width or 0) - len(head))
    parts = [one_line(text)] if width is None else wrap(one_line(text), room, break_on_hyphens=False) or [""]
    return [Text.assemble(head if place == 0 else " " * len(head), (part, style)) for place, part in enumerate(parts)]
