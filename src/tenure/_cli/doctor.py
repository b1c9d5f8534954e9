"""``tenure doctor``: check a store, measure it, and print warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

import tenure
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, connect_existing, exit_of, json_option, one_url
from tenure._cli.output import print_json, print_line, print_table, seconds
from tenure._one_line import one_line

if TYPE_CHECKING:
    from tenure import Diagnosis

FAR = 0.25
"""The share of the default ``retry_every`` that a round trip may take without a warning."""


@click.command("doctor", cls=Command)
@click.argument("address", required=False, metavar="[URL]")
@click.option("--on", "on", metavar="URL", envvar="TENURE_URL", help="The same as URL; default: TENURE_URL.")
@click.option("--look-only", is_flag=True, help="Only read; write no message, and no lease.")
@click.option("--strict", is_flag=True, help="End with 1 if there are warnings.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, address: str | None, on: str | None, look_only: bool, strict: bool, as_json: bool
) -> int:
    """Check the store at URL: show its version, latency, traits and settings, and warnings, each marked by "!".

    Each warning ends with its code in brackets: tenure explain CODE says what to do about it.

    If it has queues, a message is sent through one named tenure-doctor-…, which is deleted again. etcd is asked for a
    lease, which is revoked again. With --look-only, nothing is written.

    Ends with 0 if the store can be used, even with warnings (but see --strict), with 69 if it can't be reached or
    refuses a message (because it is full, for example), and with 78 if it can't work as it is configured, or is an
    SQLite file that doesn't exist: this command doesn't create one.
    """
    diagnosis = complete(_examine(one_url(ctx, address, on, "sqlite:///work.db"), write=not look_only))
    advice = list(_advice(diagnosis))
    if as_json:
        print_json(_for_programs(diagnosis, advice))
    else:
        _for_people(diagnosis, advice)
    if diagnosis.failure is not None:
        code, message = exit_of(diagnosis.failure)
        text = f"the store answers, but a message could not be sent and completed: {message}"
        raise Failure(code, text) from diagnosis.failure
    return Exit.BROKEN if advice and strict else Exit.DONE


async def _examine(url: str, *, write: bool) -> Diagnosis:
    async with connect_existing(url) as backend:
        return await backend.diagnose(write=write)


class Advice(NamedTuple):
    """A warning: what it is about, its text, and the code under which ``tenure explain`` says more."""

    about: str
    text: str
    code: str


def _advice(diagnosis: Diagnosis) -> Iterator[Advice]:
    """Yield each warning."""
    for fact in diagnosis.facts:
        if fact.advice:
            yield Advice(fact.name, fact.advice, fact.code)
    usual = tenure.Timing()
    if diagnosis.round_trip > FAR * usual.retry_every:
        yield Advice(
            "round trip",
            f"a round trip takes {seconds(diagnosis.round_trip)}, and a renewal is given up after "
            f"{usual.retry_every:g} s by default; use a longer ttl, or a nearer store",
            "round-trip",
        )
    traits = diagnosis.traits
    if traits is None:
        return
    if not traits.survives_restart and traits.fencing == "native":  # others compute tokens that go on rising
        yield Advice(
            "survives restart",
            "tokens start at 1 again when the store's process restarts; a fence can't be relied on across restarts",
            "tokens-restart",
        )
    if not traits.hints:
        yield Advice(
            "hints",
            "the store reports no vacancies; candidates poll every retry_every, so fail-over takes that much longer",
            "no-hints",
        )


def _for_people(diagnosis: Diagnosis, advice: list[Advice]) -> None:
    rows = [("store", diagnosis.url), ("round trip", seconds(diagnosis.round_trip))]
    if diagnosis.traits is None:
        rows += [("elections", "none")]
    else:
        rows += [(_spoken(name), _shown(value)) for name, value in dataclasses.asdict(diagnosis.traits).items()]
    if diagnosis.queues is None:
        rows += [("queues", "none")]
    else:
        traits = dataclasses.asdict(diagnosis.queues).items()
        rows += [(f"queues: {_spoken(name)}", _shown(value)) for name, value in traits]
    rows += [(fact.name, fact.value) for fact in diagnosis.facts]
    print_table(("", ""), rows, titles=False)
    print_line("")
    if not advice:
        print_line("No warnings.")
    for one in advice:
        print_line(f"! {one_line(one.about)}: {one_line(one.text)}{f' [{one.code}]' if one.code else ''}")
    if codes := [one.code for one in advice if one.code]:  # a store of another package may have none
        print_line(f"\nEach warning in full: tenure explain CODE, for example: tenure explain {codes[0]}")


def _for_programs(diagnosis: Diagnosis, advice: list[Advice]) -> dict[str, object]:
    return {
        "url": diagnosis.url,
        "round_trip": diagnosis.round_trip,
        "traits": diagnosis.traits and dataclasses.asdict(diagnosis.traits),
        "queues": diagnosis.queues and dataclasses.asdict(diagnosis.queues),
        "facts": {fact.name: fact.value for fact in diagnosis.facts},
        "advice": [{"about": one.about, "advice": one.text, "code": one.code} for one in advice],
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
