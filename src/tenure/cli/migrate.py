"""``tenure migrate``: create or upgrade what a store needs before it can be used."""

from __future__ import annotations

import click

from tenure.cli.examples import Command
from tenure.cli.exits import Exit
from tenure.cli.group import complete, connect, one_url
from tenure.cli.output import clean, say


@click.command("migrate", cls=Command)
@click.argument("address", required=False, metavar="[URL]")
@click.option("--on", "on", metavar="URL", envvar="TENURE_URL", help="The same as URL; default: TENURE_URL.")
@click.pass_context
def command(ctx: click.Context, address: str | None, on: str | None) -> int:
    """Create or upgrade the schema in the store at URL. Done already, it does nothing.

    PostgreSQL needs it once, and after an upgrade of tenure; its option schema=NAME says where. It ends with 0 once the
    schema is as this tenure needs it, with 69 if the store can't be reached, and with 78 if it may not be changed or is
    newer than this tenure.
    """
    say(clean(complete(_migrate(one_url(ctx, address, on, "postgresql://localhost/orders")))))
    return Exit.DONE


async def _migrate(url: str) -> str:
    async with connect(url) as backend:
        return await backend.migrate()
