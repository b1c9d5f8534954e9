"""The displays: a live one for terminals, plain lines for everything else."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tenure.cli.output import clean
from tenure.demo.scene import Player, Scene, State
from tenure.demo.summary import Summary

NEWS_SHOWN = 12
BAR = 40

_STYLES: dict[State, str] = {
    "starting": "dim",
    "standing by": "",
    "leading": "bold green",
    "killed": "bold red",
    "ended": "dim",
    "failed": "bold red",
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
        self._console.print(_line(at, text), soft_wrap=True)


class Picture:
    """Draws the whole scene, again and again, in one place of the terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Picture:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def draw(self, scene: Scene) -> None:
        """Draw it."""
        self._live.update(_picture(scene), refresh=True)

    def tell(self, at: float, text: str) -> None:
        """Do nothing: what happened is among the scene's news, and drawn with it."""


def show_summary(console: Console, summary: Summary) -> None:
    """Print what happened, and what of it is wrong."""
    console.print()
    for title, text in summary.rows():
        console.print(Text.assemble((f"{title:<14}", "bold"), clean(text)), soft_wrap=True)
    for problem in summary.problems():
        console.print(Text(clean(f"✗ {problem}"), style="bold red"), soft_wrap=True)
    if not summary.problems():
        told = "✓ a worker and the leader were killed, nothing was lost, nothing counted twice, and the result is right"
        console.print(Text(told, style="bold green"), soft_wrap=True)


def _picture(scene: Scene) -> RenderableType:
    head = Text.assemble(("tenure demo", "bold"), f"   election {scene.election!r}: ", (_lead(scene), "bold"))
    lease = Table.grid(padding=(0, 1))
    lease.add_row(Text("lease"), _bar(scene.ttl, scene.lease_left), Text(f"{scene.lease_left:.1f} s left"))
    progress, queue = scene.progress, scene.queue
    work = Text(f"{progress.settled:,} of {progress.of:,} messages; plain run beside: {scene.plain}")
    lease.add_row(Text("work"), _bar(progress.of, progress.settled), work)
    states = f"{queue.ready} ready, {queue.locked} locked, {queue.delayed} delayed, {queue.dead} dead"
    lease.add_row(Text("queue"), _bar(progress.of, queue.ready), Text(states))
    news = [_line(at, text) for at, text in scene.news[-NEWS_SHOWN:]]
    return Group(head, Text(), _players(scene), Text(), lease, Text(), *news)


def _lead(scene: Scene) -> str:
    for player in scene.players:
        if player.number == scene.leader:
            held = "held by the dead" if player.state == "killed" else "led by"
            return f"{held} {player.name}, term {scene.token}"
    return "nobody leads"


def _players(scene: Scene) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("instance", "pid", "counted", "in hand", "state"):
        table.add_column(title, header_style="dim")
    for player in scene.players:
        state = Text(_state(player, scene), _STYLES[player.state])
        in_hand = f"message {player.chunk}" if player.chunk else ""
        table.add_row(str(player.number), str(player.pid), str(player.counted), in_hand, state)
    return table


def _state(player: Player, scene: Scene) -> str:
    if player.state == "leading":
        return f"leading, term {player.token}"
    if player.state == "killed" and player.number == scene.leader:
        return f"killed; its lease of term {player.token} runs on"
    return player.state


def _bar(of: float, done: float) -> ProgressBar:
    return ProgressBar(total=of, completed=min(of, done), width=BAR)


def _line(at: float, text: str) -> Text:
    return Text.assemble((f"{at:6.2f} s  ", "dim"), clean(text))
