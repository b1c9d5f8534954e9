"""``tenure migrate``: create or upgrade the schema of a store."""

from __future__ import annotations

import click

from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import complete, connect, connect_existing, one_url
from tenure._cli.output import print_line
from tenure._one_line import one_line


@click.command("migrate", cls=Command)
@click.argument("address", required=False, metavar="[URL]")
@click.option("--on", "on", metavar="URL", envvar="TENURE_URL", help="The same as URL; default: TENURE_URL.")
@click.option("--sql", "as_sql", is_flag=True, help="Print the SQL instead of running it.")
@click.option(
    "--from",
    "since",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --sql: for a schema of version N, without asking the store; 0: for a new one.",
)
@click.option("--set-clock", "sets_clock", is_flag=True, help="Set the clock of an SQLite file back, instead.")
@click.option("--yes", "is_sure", is_flag=True, help="With --set-clock: do it; without, only say what would be done.")
@click.pass_context
def command(
    ctx: click.Context,
    address: str | None,
    on: str | None,
    as_sql: bool,
    since: int | None,
    sets_clock: bool,
    is_sure: bool,
) -> int:
    """Create or upgrade the schema in the store at URL. If it is up to date, nothing is changed.

    PostgreSQL needs this once, and after an upgrade of tenure; the URL's option schema=NAME names the schema. RabbitMQ
    needs it if users have only the rights of docs/rabbitmq.md: it declares what delayed messages go through. Ends with
    0 once the schema is up to date, with 69 if the store can't be reached, and with 78 if the schema may not be changed
    or is newer than this tenure.

    --sql is for sites where only a DBA changes the schema: it prints a script for psql, from the version that the store
    has; without a store it prints the whole schema.

    --set-clock is for an SQLite file whose clock a wrong wall clock has moved ahead, as tenure doctor says. It sets
    that back to this machine's clock, which must be right, and shifts what was noted meanwhile. Other processes may go
    on.
    """
    if sets_clock and as_sql:
        raise click.UsageError("--set-clock sets a clock, and --sql prints a schema; give either")
    if is_sure and not sets_clock:
        raise click.UsageError("--yes needs --set-clock")
    if since is not None and not as_sql:
        raise click.UsageError("--from needs --sql")
    if as_sql:
        if since is None and not (address or on):
            since = 0
        url = one_url(ctx, address, on, "") if address or on else "postgresql://localhost"
        print_line(complete(_sql(url, since)).rstrip("\n"))
        return Exit.DONE
    if sets_clock:
        said = complete(_set_clock(one_url(ctx, address, on, "sqlite:///work.db"), dry_run=not is_sure))
        print_line(one_line(said))
        if not is_sure and "would be" in said:
            print_line("nothing was changed; add --yes to do it")
        return Exit.DONE
    print_line(one_line(complete(_migrate(one_url(ctx, address, on, "postgresql://localhost/orders")))))
    return Exit.DONE


async def _migrate(url: str) -> str:
    async with connect(url) as backend:
        return await backend.migrate()


async def _set_clock(url: str, *, dry_run: bool) -> str:
    async with connect_existing(url) as backend:
        return await backend.set_clock(dry_run=dry_run)


async def _sql(url: str, since: int | None) -> str:
    backend = connect(url)
    if since is not None:
        return await backend.migration_sql(since)
    async with backend:
        return await backend.migration_sql()
