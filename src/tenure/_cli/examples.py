"""The two examples at the end of each ``--help``: those of every command, and where they are shown.

A new command gets its two here, under the words that call it, and is made with ``cls=Command`` (a command of a group
without that). A test runs them, and fails for a command that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import click

Examples = tuple[tuple[str, str], tuple[str, str]]
"""Each: what it is good for, in a line; and the line for the shell. Where no --on is given, TENURE_URL is set."""

EXAMPLES: Mapping[str, Examples] = MappingProxyType(
    {
        "": (
            ("Run a command in one place at a time: start this in two shells.",
             "tenure lead nightly-report --on sqlite:///work.db -- sleep 60"),
            ("Put a message into a queue, on the same store.",
             "tenure send orders 'two kettles' --on sqlite:///work.db"),
        ),
        "lead": (
            ("Run it on one machine only; the others wait, and one takes over.",
             "tenure lead nightly-report -- python report.py"),
            ("Let a shell see the fencing token; a dead leader is replaced within 5 s.",
             "tenure lead nightly-report --ttl 5s -- sh -c 'echo term $TENURE_TOKEN'"),
        ),
        "status": (
            ("Show every name, and who leads it.",
             "tenure status"),
            ("Act in a script if nobody leads.",
             "tenure status nightly-report --json || echo 'nobody leads'"),
        ),
        "watch": (
            ("Show each change of leader until Ctrl-C.",
             "tenure watch nightly-report"),
            ("Write who leads now, for a program, and end.",
             "tenure watch nightly-report --json --count 1"),
        ),
        "resign": (
            ("Hand the work over to another machine, before this one is restarted.",
             "tenure resign nightly-report"),
            ("Wait until it is handed over.",
             "tenure resign nightly-report --wait 30s"),
        ),
        "doctor": (
            ("Send a message through the store, and tell what to mind.",
             "tenure doctor sqlite:///work.db"),
            ("Only look, and write nothing; for a program.",
             "tenure doctor --look-only --json"),
        ),
        "migrate": (
            ("Make the tables, or bring them up to date.",
             "tenure migrate postgresql://localhost/orders"),
            ("Write the SQL for a DBA instead, who loads it with psql.",
             "tenure migrate --sql > tenure.sql"),
        ),
        "send": (
            ("Send one message, to be received in ten minutes.",
             "tenure send orders 'two kettles' --delay 10m"),
            ("Send a message for each line of what a program writes.",
             "seq 100 | tenure send orders --lines"),
        ),
        "work": (
            ("Run a command for each message, four at a time; the body is its input.",
             "tenure work orders --concurrency 4 -- python serve.py"),
            ("Write what is in the queue to the terminal, and end.",
             "tenure work orders --until-empty -- sh -c 'cat; echo'"),
        ),
        "queue": (
            ("Count the messages of every queue.",
             "tenure queue"),
            ("Count those of one, every ten seconds.",
             "tenure queue orders --watch --every 10s"),
        ),
        "queue peek": (
            ("Show the ten oldest messages; nothing is locked.",
             "tenure queue peek orders --limit 10"),
            ("Tell a program which are with a consumer, and until when.",
             "tenure queue peek orders --state locked --json"),
        ),
        "queue purge": (
            ("See how many would be removed.",
             "tenure queue purge orders --all --dry-run"),
            ("Remove what has waited for more than a week.",
             "tenure queue purge orders --state ready --older-than 7d"),
        ),
        "queue delete": (
            ("Delete it with all that is in it.",
             "tenure queue delete orders --force"),
            ("Tell a program what was in it.",
             "tenure queue delete orders --force --json"),
        ),
        "dead": (
            ("See what died, and why.",
             "tenure dead list orders"),
            ("Give it another chance, after the mend.",
             "tenure dead redrive orders"),
        ),
        "dead list": (
            ("List them, oldest first.",
             "tenure dead list orders"),
            ("List those that every delivery has failed for, for a program.",
             "tenure dead list orders --reason max_deliveries --json"),
        ),
        "dead show": (
            ("Show all about the letter that the list calls 17.",
             "tenure dead show orders 17"),
            ("Save its body.",
             "tenure dead show orders 17 --body > letter.bin"),
        ),
        "dead redrive": (
            ("See how many would be put back.",
             "tenure dead redrive orders --dry-run"),
            ("Put ten into another queue, where somebody tries them.",
             "tenure dead redrive orders --limit 10 --to orders-mended"),
        ),
        "dead purge": (
            ("Remove one for good.",
             "tenure dead purge orders --sequence 17"),
            ("Remove those of last month.",
             "tenure dead purge orders --older-than 30d"),
        ),
        "sim": (
            ("Simulate a hundred seeds of queues under faults.",
             "tenure sim --queues --seeds 0-99"),
            ("Replay one seed of elections, line by line.",
             "tenure sim --seed 4217 --trace"),
        ),
        "demo": (
            ("See four processes elect a leader and share the work.",
             "tenure demo"),
            ("See six on another store.",
             "tenure demo --instances 6 --on redis://localhost"),
        ),
    }
)  # fmt: skip


class Command(click.Command):
    """A command whose help ends with its two examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them last, and as they are to be pasted: no line is wrapped."""
        super().format_epilog(ctx, formatter)
        if (found := EXAMPLES.get(words(ctx))) is None:
            return
        with formatter.section("Examples"):
            margin = " " * formatter.current_indent
            for told, line in found:
                formatter.write(f"{margin}# {told}\n{margin}{line}\n")


def words(ctx: click.Context) -> str:
    """Return the words that call a command, without the program's name."""
    words = []
    while ctx.parent is not None:
        words.append(ctx.info_name or "")
        ctx = ctx.parent
    return " ".join(reversed(words))
