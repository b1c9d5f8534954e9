"""``tenure doctor``: reach a store, measure it, and tell what to mind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

import tenure
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, connect_to_look, json_option, one_url, told
from tenure._cli.output import clean, say, say_json, say_table, seconds

if TYPE_CHECKING:
    from tenure import Diagnosis

FAR = 0.25
"""Which share of the default ``retry_every`` a round trip may take before it is worth a word."""


@click.command("doctor", cls=Command)
@click.argument("address", required=False, metavar="[URL]")
@click.option("--on", "on", metavar="URL", envvar="TENURE_URL", help="The same as URL; default: TENURE_URL.")
@click.option("--look-only", is_flag=True, help="Write nothing; otherwise a message is sent, received and completed.")
@click.option("--strict", is_flag=True, help="End with 1 if there is any advice.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, address: str | None, on: str | None, look_only: bool, strict: bool, as_json: bool
) -> int:
    """Reach the store at URL and tell what it is, how far away, what it can promise, and what to mind.

    Where there are queues, it tries one of its own, named tenure-doctor-…, and deletes it again.

    Ends with 0 if the store can be used, even if there is advice (but see --strict), with 69 if it can't be reached or
    takes no message (it is full, say), and with 78 if it can never work as it is, or is an SQLite file that isn't
    there: looking doesn't make one.
    """
    diagnosis = complete(_examine(one_url(ctx, address, on, "sqlite:///work.db"), write=not look_only))
    advice = list(_advice(diagnosis))
    if as_json:
        say_json(_for_programs(diagnosis, advice))
    else:
        _for_people(diagnosis, advice)
    if diagnosis.failure is not None:
        code, message = told(diagnosis.failure)
        raise Failure(code, f"the store was reached, and a message could not be kept and removed: {message}")
    return Exit.BROKEN if advice and strict else Exit.DONE


async def _examine(url: str, *, write: bool) -> Diagnosis:
    async with connect_to_look(url) as backend:
        return await backend.diagnose(write=write)


def _advice(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield what an operator should mind, each with what it is about."""
    for fact in diagnosis.facts:
        if fact.advice:
            yield fact.name, fact.advice
    usual = tenure.Timing()
    if diagnosis.round_trip > FAR * usual.retry_every:
        yield (
            "round trip",
            f"an answer takes {seconds(diagnosis.round_trip)}, and a renewal is given up after {usual.retry_every:g} s "
            "by default; use a longer ttl, or a nearer store",
        )
    traits = diagnosis.traits
    if not traits.survives_restart:
        yield "survives restart", "tokens begin anew with the store's process; do not fence with them across that"
    if not traits.hints:
        yield "hints", "nobody is told of a vacancy; candidates look every retry_every, so fail-over takes that longer"


def _for_people(diagnosis: Diagnosis, advice: list[tuple[str, str]]) -> None:
    rows = [("store", diagnosis.url), ("round trip", seconds(diagnosis.round_trip))]
    rows += [(_spoken(name), _shown(value)) for name, value in dataclasses.asdict(diagnosis.traits).items()]
    if diagnosis.queues is None:
        rows += [("queues", "none")]
    else:
        told = dataclasses.asdict(diagnosis.queues).items()
        rows += [(f"queues: {_spoken(name)}", _shown(value)) for name, value in told]
    rows += [(fact.name, fact.value) for fact in diagnosis.facts]
    say_table(("", ""), rows, titles=False)
    say("")
    if not advice:
        say("All is well.")
    for name, text in advice:
        say(f"! {clean(name)}: {clean(text)}")


def _for_programs(diagnosis: Diagnosis, advice: list[tuple[str, str]]) -> dict[str, object]:
    return {
        "url": diagnosis.url,
        "round_trip": diagnosis.round_trip,
        "traits": dataclasses.asdict(diagnosis.traits),
        "queues": diagnosis.queues and dataclasses.asdict(diagnosis.queues),
        "facts": {fact.name: fact.value for fact in diagnosis.facts},
        "advice": [{"about": name, "advice": text} for name, text in advice],
    }


def _spoken(name: str) -> str:
    what, _, limit = name.rpartition("_")
    if limit == "min":
        return f"shortest {what}"
    if limit == "max":
        return f"{'largest' if what == 'body' else 'longest'} {what}"
    return name.replace("_", " ")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,} bytes"
    return f"{value:g} s" if isinstance(value, float) else str(value)
