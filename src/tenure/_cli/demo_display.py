"""The displays: a live one for terminals, plain lines for everything else."""

from __future__ import annotations

from textwrap import wrap

from rich.console import Console
from rich.text import Text

from tenure._cli.live import Canvas
from tenure._cli.output import ALARM, LEADING, QUIET, TITLE, Cell, clean, ellipsis
from tenure._cli.tables import Column, laid_out
from tenure._demo.setup import Player, Scene, State
from tenure._demo.summary import Summary

NEWS_LEAST = 6
"""Lines that are kept for the news, however many instances there are."""

BAR, BAR_LEAST = 40, 10

TITLES = 14
"""Characters of a title in the summary."""

PROBLEM, WELL = ALARM, LEADING

COLUMNS = (
    Column("instance"),
    Column("pid", numbers=True),
    Column("counted", numbers=True),
    Column("in hand"),
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


class Lines:
    """Says what happens line by line, and at each quarter how far the work is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._quarter = 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def draw(self, scene: Scene) -> None:
        """Say it when another quarter is done."""
        progress = scene.progress
        quarter = 4 * progress.settled // progress.of
        if self._quarter < quarter < 4:
            self._quarter = quarter
            self.tell(scene.elapsed, f"{progress.settled:,} of {progress.of:,} messages are accounted for")

    def tell(self, at: float, text: str) -> None:
        """Say it."""
        self._console.print(*_line(at, text, None), soft_wrap=True)


class Picture:
    """Draws the whole scene, again and again, on the terminal's other screen; the last picture stays, with all news."""

    def __init__(self, console: Console) -> None:
        self._scene: Scene | None = None
        self._canvas = Canvas(self._lines, console)

    def __enter__(self) -> Picture:
        return self

    def __exit__(self, *_: object) -> None:
        self._canvas.leave()

    def draw(self, scene: Scene) -> None:
        """Draw it."""
        self._scene = scene
        self._canvas.draw()

    def tell(self, at: float, text: str) -> None:
        """Do nothing: what happened is among the scene's news, and drawn with it."""

    def stop(self) -> None:
        """Stop this process, with the usual screen shown, until the shell lets it go on."""
        self._canvas.stop()

    def _lines(self, width: int, height: int | None) -> list[Text]:
        return _picture(self._scene, width, height) if self._scene else []


def show_summary(console: Console, summary: Summary) -> None:
    """Print what happened, and what of it is wrong: for people on a terminal, wrapped at words."""
    width = console.width if console.is_terminal else None
    console.print()
    for title, text in summary.rows():
        _print(console, Text(title.ljust(TITLES), TITLE), text, width)
    for problem in summary.problems():
        _print(console, Text("✗ ", PROBLEM), problem, width, PROBLEM)
    if not summary.problems():
        told = "a worker and the leader were killed, nothing was lost, nothing counted twice, and the result is right"
        _print(console, Text("✓ ", WELL), told, width, WELL)


def _print(console: Console, head: Text, text: str, width: int | None, style: str = "") -> None:
    for line in _wrapped(head, text, width, style):
        console.print(line, soft_wrap=True)


def _picture(scene: Scene, width: int, height: int | None) -> list[Text]:
    """Return the lines of the whole scene; where the height is given, with those of the news that fit, the newest."""
    state = Text.assemble(("tenure demo", TITLE), f"  election {scene.election!r}: ", (_lead(scene), TITLE))
    room = None if height is None else height - 7 - NEWS_LEAST  # what stands around them
    head = [state, Text(), *_players(scene, width, room), Text(), *_bars(scene, width), Text()]
    news = [line for at, text in sorted(scene.news) for line in _line(at, text, width)]
    if height is None:
        return [*head, *news]
    left = height - len(head)
    return [*head, *(news[-left:] if left > 0 else [])]


def _lead(scene: Scene) -> str:
    for player in scene.players:
        if player.number == scene.leader:
            held = "held by the dead" if player.state == "killed" else "led by"
            return f"{held} {player.name}, term {scene.token}"
    return "nobody leads"


def _players(scene: Scene, width: int, room: int | None) -> list[Text]:
    """Return a table of the instances; of more than there is room for, those that matter most."""
    shown = scene.players
    if room is not None and len(shown) > room:
        ranked = sorted(shown, key=lambda player: player.state not in ("leading", "killed", "failed"))
        kept = {player.number for player in ranked[: max(1, room - 1)]}
        shown = [player for player in shown if player.number in kept]
    rows = [
        (
            str(player.number),
            str(player.pid),
            str(player.counted),
            f"message {player.chunk}" if player.chunk else "",
            Cell(_state(player, scene), _STYLES[player.state]),
        )
        for player in shown
    ]
    table = laid_out(COLUMNS, rows, width)
    left_out = len(scene.players) - len(shown)
    return [*table, Text(f"{ellipsis()} and {left_out} more", QUIET)] if left_out else table


def _state(player: Player, scene: Scene) -> str:
    if player.state == "leading":
        return f"leading, term {player.token}"
    if player.state == "killed" and player.number == scene.leader:
        return f"killed; its lease of term {player.token} runs on"
    return player.state


def _bars(scene: Scene, width: int) -> list[Text]:
    progress, queue = scene.progress, scene.queue
    bars = [
        ("lease", scene.ttl, scene.lease_left, f"{scene.lease_left:.1f} s left"),
        (
            "work",
            progress.of,
            progress.settled,
            f"{progress.settled:,} of {progress.of:,} messages; plain run: {scene.plain}",
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
    parts = [clean(text)] if width is None else wrap(clean(text), room, break_on_hyphens=False) or [""]
    return [Text.assemble(head if place == 0 else " " * len(head), (part, style)) for place, part in enumerate(parts)]
