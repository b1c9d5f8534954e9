"""Write docs/commands.md: each command of the command line with its options, as --help has them.

``--check`` only compares.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from tenure._cli.examples import EXAMPLES
from tenure._cli.exits import OTHER_CODES, Exit
from tenure._cli.group import COMMANDS, group

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"

HEAD = """\
# The commands

Written by `python scripts/commands.py` from what `tenure COMMAND --help` prints, and checked by the tests. [The command
line](cli.md) says what holds for all of them. A duration is a number of seconds (`15`, `0.5`), or has a unit: `500ms`,
`15s`, `2m`, `1h`, `7d`. Each has `-h` and `--help`.
"""

BAR = r"\|"
"""A bar in a cell of a table, also in code."""


def main() -> int:
    page = page_of_commands()
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == page:
            return 0
        print("docs/commands.md differs from the commands; run: python scripts/commands.py", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def page_of_commands() -> str:
    whole = click.Context(group, None, "tenure")
    sections = [section for name in COMMANDS for section in sections_of(name, group, whole)]
    return "\n".join([HEAD, *sections, exit_codes()])


def sections_of(name: str, parent: click.Group, within: click.Context) -> Iterator[str]:
    """Yield the section of a command, and those of its own commands."""
    command = parent.get_command(within, name)
    assert command is not None, name
    context = click.Context(command, within, name)
    yield section(command, context)
    branches: dict[str, click.Command] = getattr(command, "branches", None) or getattr(command, "commands", {})
    for branch, one in branches.items():
        yield section(one, click.Context(one, within, f"{name} {branch}"))


def section(command: click.Command, context: click.Context) -> str:
    path = context.command_path
    deep = "###" if path.count(" ") > 1 else "##"
    usage = command.get_usage(context).removeprefix("Usage: ").split()
    parts = [f"{deep} {path}", f"```text\n{' '.join(usage)}\n```", described(command)]
    records = [one.get_help_record(context) for one in command.params]
    rows = [
        f"| `{names.replace('|', BAR)}` | {prose(meaning)} |" for names, meaning in filter(None, records) if meaning
    ]
    parts.append("\n".join(["| Option | Meaning |", "|---|---|", *rows]))
    lines = [f"# {purpose}\n{line}" for purpose, line in EXAMPLES[path.removeprefix("tenure ")]]
    parts.append("```sh\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts) + "\n"


def described(command: click.Command) -> str:
    return "\n\n".join(prose(one) for one in inspect.cleandoc(command.help or "").split("\n\n"))


def prose(text: str) -> str:
    """Return *text* on one line, as Markdown: options and variables as code, and the rest as it is."""
    quoted, code = re.compile(r"(`[^`]*`)"), re.compile(r"(?<![\w-])(--[a-z][\w-]*|[A-Z]+_[A-Z_]+|[a-z]+_[a-z_]+)")
    parts = quoted.split(" ".join(text.split()))
    return "".join(
        part.replace("|", BAR) if quoted.match(part) else code.sub(r"`\1`", re.sub(r"([|<*])", r"\\\1", part))
        for part in parts
    )


def exit_codes() -> str:
    rows = [f"| {int(code)} | {prose(code.meaning)} |" for code in Exit]
    return "\n".join(["## Exit codes", "", "| Code | Meaning |", "|---|---|", *rows, "", f"{prose(OTHER_CODES)}", ""])


if __name__ == "__main__":
    sys.exit(main())
