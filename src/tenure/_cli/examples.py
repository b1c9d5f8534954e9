"""The two examples at the end of each ``--help``: of every command.

A new command gets its two here, under its name, and is made with ``cls=Command`` (a command of a group
without that). A test runs them, and fails for a command that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import click

Examples = tuple[tuple[str, str], tuple[str, str]]
"""Each: its purpose, in a line; and the line for the shell. If it has no --on, TENURE_URL is set."""

EXAMPLES: Mapping[str, Examples] = MappingProxyType(
    {
        "": (
            ("Run a command in one place at a time: start this in two shells.",
             "tenure lead nightly-report --on sqlite:///work.db -- sleep 60"),
            ("Put a message into a queue, on the same store.",
             "tenure send orders 'two kettles' --on sqlite:///work.db"),
        ),
        "lead": (
            ("Run it on one machine at a time; the others wait, and one takes over.",
             "tenure lead nightly-report -- python report.py"),
            ("Use the fencing token in a shell; a dead leader's name is free after 5 s.",
             "tenure lead nightly-report --ttl 5s -- sh -c 'echo term $TENURE_TOKEN'"),
        ),
        "run": (
            ("Run the service of a module, in as many processes as the backlog needs.",
             "tenure run shop.worker:service --processes 2..6"),
            ("Replace its process whenever a file changes, while you write it.",
             "tenure run worker:service --reload"),
        ),
        "status": (
            ("Show every name and its leader.",
             "tenure status"),
            ("Act in a script if there is no leader.",
             "tenure status nightly-report --json || echo 'no leader'"),
        ),
        "watch": (
            ("Show each change of leader until Ctrl-C.",
             "tenure watch nightly-report"),
            ("Print the present leader for a program, and end.",
             "tenure watch nightly-report --json --count 1"),
        ),
        "resign": (
            ("Move the work to another machine, before this one is restarted.",
             "tenure resign nightly-report"),
            ("Wait until the leader has stepped down.",
             "tenure resign nightly-report --wait 30s"),
        ),
        "doctor": (
            ("Send a message through the store, and show warnings.",
             "tenure doctor sqlite:///work.db"),
            ("Only read, write nothing; as JSON.",
             "tenure doctor --look-only --json"),
        ),
        "explain": (
            ("Say what an error means, and what to do about it.",
             "tenure explain unavailable"),
            ("Say what an exit code means.",
             "tenure explain 69"),
        ),
        "migrate": (
            ("Create or upgrade the tables.",
             "tenure migrate postgresql://localhost/orders"),
            ("Print the SQL for a DBA instead, to be run with psql.",
             "tenure migrate --sql > tenure.sql"),
        ),
        "send": (
            ("Send one message, to be received in ten minutes.",
             "tenure send orders 'two kettles' --delay 10m"),
            ("Send a message for each line of a program's output.",
             "seq 100 | tenure send orders --lines"),
        ),
        "work": (
            ("Run a command for each message, four at a time; the body is its input.",
             "tenure work orders --concurrency 4 -- python serve.py"),
            ("Print the messages of the queue to the terminal, and end.",
             "tenure work orders --until-empty -- sh -c 'cat; echo'"),
        ),
        "queue": (
            ("Count the messages of every queue.",
             "tenure queue"),
            ("Count those of one queue every ten seconds.",
             "tenure queue orders --watch --every 10s"),
        ),
        "queue declare": (
            ("Lock messages for a minute, and deliver them five times at most.",
             "tenure queue declare orders --lock 1m --max-deliveries 5"),
            ("Let all consumers together handle 100 messages a minute, and 5 at once.",
             "tenure queue declare orders --rate 100/1m --max-locked 5"),
        ),
        "queue pause": (
            ("Let no machine receive, while a service that they call is down.",
             "tenure queue pause orders"),
            ("Print as JSON what the queue holds then.",
             "tenure queue pause orders --json"),
        ),
        "queue resume": (
            ("Let all consumers receive again.",
             "tenure queue resume orders"),
            ("Print as JSON what the queue holds then.",
             "tenure queue resume orders --json"),
        ),
        "queue peek": (
            ("Show the ten oldest messages; nothing is locked.",
             "tenure queue peek orders --limit 10"),
            ("List the locked messages and the ends of their locks, as JSON.",
             "tenure queue peek orders --state locked --json"),
        ),
        "queue purge": (
            ("Show how many would be removed.",
             "tenure queue purge orders --all --dry-run"),
            ("Remove messages that have waited for more than a week.",
             "tenure queue purge orders --state ready --older-than 7d"),
        ),
        "queue delete": (
            ("Delete it with all its messages.",
             "tenure queue delete orders --force"),
            ("Print as JSON how many messages it had.",
             "tenure queue delete orders --force --json"),
        ),
        "dead": (
            ("List dead letters, with their reasons.",
             "tenure dead list orders"),
            ("Deliver them again, after the cause is fixed.",
             "tenure dead redrive orders"),
        ),
        "dead list": (
            ("List them, oldest first.",
             "tenure dead list orders"),
            ("List those whose deliveries have all failed, as JSON.",
             "tenure dead list orders --reason max_deliveries --json"),
        ),
        "dead show": (
            ("Show everything about letter 17 of the list.",
             "tenure dead show orders 17"),
            ("Save its body.",
             "tenure dead show orders 17 --body > letter.bin"),
        ),
        "dead redrive": (
            ("Show how many would be put back.",
             "tenure dead redrive orders --dry-run"),
            ("Put ten into another queue, to be tried there.",
             "tenure dead redrive orders --limit 10 --to orders-mended"),
        ),
        "dead purge": (
            ("Remove one for good.",
             "tenure dead purge orders --sequence 17"),
            ("Remove those older than 30 days.",
             "tenure dead purge orders --older-than 30d"),
        ),
        "partitions": (
            ("List the groups, with the number of their partitions and members.",
             "tenure partitions"),
            ("Show which partitions each member of one owns.",
             "tenure partitions orders"),
        ),
        "schedule": (
            ("List all schedules of the store, with their last and next times.",
             "tenure schedule"),
            ("Print them as JSON, for a program.",
             "tenure schedule --json"),
        ),
        "schedule pause": (
            ("Skip the times of a schedule, in all processes.",
             "tenure schedule pause tidy"),
            ("Name its queue, if several have a schedule of this name.",
             "tenure schedule pause tidy --queue tidy"),
        ),
        "schedule resume": (
            ("Go on with its next time.",
             "tenure schedule resume tidy"),
            ("Print as JSON when that is.",
             "tenure schedule resume tidy --json"),
        ),
        "schedule remove": (
            ("Forget a schedule that is no longer in the program.",
             "tenure schedule remove tidy"),
            ("Name its queue, if several have a schedule of this name.",
             "tenure schedule remove tidy --queue tidy"),
        ),
        "schedule times": (
            ("Show the next times of a cron expression, with the changes of clocks.",
             "tenure schedule times '30 2 * * *' --timezone Europe/Berlin"),
            ("Show a hundred times of an interval.",
             "tenure schedule times 90m --count 100"),
        ),
        "top": (
            ("Watch the whole store until Ctrl-C.",
             "tenure top"),
            ("Print what it has now, once.",
             "tenure top --count 1"),
        ),
        "dashboard": (
            ("Show the store at http://127.0.0.1:8160, and change nothing.",
             "tenure dashboard"),
            ("With bodies of messages, and buttons to put back dead letters.",
             "tenure dashboard --allow-changes --show-bodies"),
        ),
        "sim": (
            ("Simulate a hundred seeds of queues under faults.",
             "tenure sim --queues --seeds 0-99"),
            ("Replay one seed of elections, line by line.",
             "tenure sim --seed 4217 --trace"),
        ),
        "demo": (
            ("Watch four processes elect a leader and share the work.",
             "tenure demo"),
            ("Watch six on another store.",
             "tenure demo --instances 6 --on redis://localhost"),
        ),
    }
)  # fmt: skip


class Command(click.Command):
    """A command whose help ends with its two examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them last, ready to be pasted: no line is wrapped."""
        super().format_epilog(ctx, formatter)
        if (found := EXAMPLES.get(words(ctx))) is None:
            return
        with formatter.section("Examples"):
            margin = " " * formatter.current_indent
            for purpose, line in found:
                formatter.write(f"{margin}# {purpose}\n{margin}{line}\n")


def words(ctx: click.Context) -> str:
    """Return the words that call a command, without the program's name."""
    words = []
    while ctx.parent is not None:
        words.append(ctx.info_name or "")
        ctx = ctx.parent
    return " ".join(reversed(words))
