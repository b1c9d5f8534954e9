"""The facts that ``tenure doctor`` shows of a PostgreSQL: the settings that the promises depend on."""

from __future__ import annotations

from tenure._backends.postgres.client import Client
from tenure._backends.postgres.statements import VERSION
from tenure._opened import Fact

_FACTS = """
SELECT current_setting('server_version') AS version,
       current_setting('synchronous_commit') AS commits,
       current_setting('fsync') AS fsync,
       current_setting('max_connections') AS most,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS used,
       (SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()) AS tls,
       (SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::float8
        FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()) AS oldest
"""


async def diagnose(client: Client) -> list[Fact]:
    """Return facts about the server of *client*."""
    [row] = await client.fetch(_FACTS)
    risky = "" if row["fsync"] == "on" else "a power failure can lose committed changes; set fsync = on"
    lazy = "" if row["commits"] != "off" else "a crash can lose the newest changes, tokens too; set it to on"
    old = row["oldest"] or 0.0
    held = f"a transaction has been open for {old:.0f} s and blocks vacuum; find it in pg_stat_activity"
    return [
        Fact("PostgreSQL", row["version"]),
        Fact("schema", f"{client.options.schema}, version {VERSION}"),
        Fact("synchronous_commit", row["commits"], lazy, "postgres-synchronous-commit"),
        Fact("fsync", row["fsync"], risky, "postgres-fsync"),
        Fact("TLS", "yes" if row["tls"] else "no"),
        Fact("connections", f"{row['used']} of {row['most']}; {client.options.pool} for each loop here"),
        Fact("oldest transaction", f"{old:.0f} s", held if old > 600 else "", "postgres-long-transaction"),
    ]
