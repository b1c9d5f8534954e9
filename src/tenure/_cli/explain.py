"""``tenure explain``: print what the documents say about an error, an exit code or a warning, without a network."""

from __future__ import annotations

import shutil
import sys

import click

from tenure._cli.completion import explained_codes
from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.explanations import HOME, Section, code_of, lines_of, sections
from tenure._cli.group import json_option
from tenure._cli.output import TITLE, Cell, print_json, print_line, print_table
from tenure.errors import nearest

WIDTH_MIN, WIDTH_MAX = 40, 100
"""The columns of the text on a terminal."""
WIDTH = 80
"""The columns of the text elsewhere."""


@click.command("explain", cls=Command)
@click.argument("code", required=False, metavar="[CODE]", shell_complete=explained_codes)
@json_option
@click.pass_context
def command(ctx: click.Context, code: str | None, as_json: bool) -> int:
    """Say what CODE means, what causes it, and what to do. It asks no store, and needs no network.

    CODE is what an error, or a warning of tenure doctor, names; an exit code, such as 69; or the name of an error, an
    event or a dead letter's reason, as a log shows it: TermLost, RenewalMissed, max_deliveries. Without CODE, all codes
    are listed.

    The same text is in docs/errors.md.
    """
    if code is None:
        _list(as_json)
        return Exit.DONE
    wanted = code_of(code)
    section = sections().get(wanted)
    if section is None:
        near = nearest(wanted, list(sections())) or "; tenure explain lists all codes"
        raise click.UsageError(f"there is no code {code!r}{near}", ctx)
    if as_json:
        print_json(_for_programs(section) | {"text": section.text.replace(HOME, "")})
    else:
        _show(section)
    return Exit.DONE


def _for_programs(section: Section) -> dict[str, str]:
    return {"code": section.code, "part": section.part, "summary": section.summary}


def _list(as_json: bool) -> None:
    if as_json:
        print_json([_for_programs(one) for one in sections().values()])
        return
    rows: list[tuple[str | Cell, str]] = []
    part = ""
    for section in sections().values():
        if section.part != part:
            rows += [("", "")] * bool(rows) + [(Cell(section.part, TITLE), "")]
            part = section.part
        rows.append((f"  {section.code}", section.summary))
    print_table(("", ""), rows, titles=False)


def _show(section: Section) -> None:
    if not sys.stdout.isatty():
        for line in lines_of(section, WIDTH):
            print_line(line)
        return
    from rich.console import Console
    from rich.text import Text

    columns = shutil.get_terminal_size().columns
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for number, line in enumerate(lines_of(section, max(WIDTH_MIN, min(columns, WIDTH_MAX)))):
        text = Text(line, "bold" if number == 0 else "cyan" if line.startswith("    ") else "")
        text.highlight_regex(r"^(Cause|Do now|Meanwhile|More):", "bold")
        text.highlight_regex(r"`[^`]+`", "cyan")
        console.print(text)
