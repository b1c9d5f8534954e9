"""The facts that ``tenure doctor`` shows of a PostgreSQL: the settings that the promises depend on."""

from __future__ import annotations

import re
from typing import Any

from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import Connection
from tenure._backends.postgres.statements import VERSION
from tenure._opened import Fact
from tenure._set_aside import facts_set_aside
from tenure._tls_facts import Verifies, tls_fact

_FACTS = """
SELECT current_setting('server_version') AS version,
       current_setting('synchronous_commit') AS commits,
       current_setting('fsync') AS fsync,
       current_setting('search_path') AS path,
       current_setting('max_connections') AS most,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS used,
       (SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::float8
        FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()) AS oldest
"""


_OWN = "pg_catalog"
"""The schema of PostgreSQL's own functions and operators."""


async def diagnose(client: Client) -> list[Fact]:
    """Return facts about the server of *client*."""
    [row] = await client.fetch(_FACTS)
    risky = "" if row["fsync"] == "on" else "a power failure can lose committed changes; set fsync = on"
    lazy = "" if row["commits"] != "off" else "a crash can lose the newest changes, tokens too; set it to on"
    old = row["oldest"] or 0.0
    held = f"a transaction has been open for {old:.0f} s and blocks vacuum; find it in pg_stat_activity"
    return [
        Fact("PostgreSQL", row["version"]),
        *_login(client),
        Fact("schema", f"{client.options.schema}, version {VERSION}"),
        Fact("synchronous_commit", row["commits"], lazy, "postgres-synchronous-commit"),
        Fact("fsync", row["fsync"], risky, "postgres-fsync"),
        Fact("search_path", row["path"], advice_on_path(row["path"]), "postgres-search-path"),
        await client.run(lambda connection: _tls(client, connection)),
        *_binding(client),
        Fact("connections", f"{row['used']} of {row['most']}; {client.options.pool} for each loop here"),
        Fact("oldest transaction", f"{old:.0f} s", held if old > 600 else "", "postgres-long-transaction"),
        *facts_set_aside(client.options),
    ]


def _binding(client: Client) -> list[Fact]:
    """Return what holds in place of a binding to TLS, if that was required."""
    if not client.encryption.binds:
        return []
    value = "require: the driver has none, so the server's certificate and name are verified in its place (verify-full)"
    return [Fact("channel_binding", value)]


def advice_on_path(path: str) -> str:
    """Return a warning if names are searched for in another schema before PostgreSQL's own; it is the first by default.

    A schema that doesn't exist counts: another user may make it. No function is ever found in pg_temp.
    """
    found = re.findall(r'"(?:[^"]|"")*"|[^\s,"]+', path)
    names = [one[1:-1].replace('""', '"') if one.startswith('"') else one.lower() for one in found]
    before = [name for name in names[: names.index(_OWN)] if name != "pg_temp"] if _OWN in names else []
    if not before:
        return ""
    return f"{_OWN} comes after {before[0]}: functions there may run in place of PostgreSQL's; leave {_OWN} out"


async def _tls(client: Client, connection: Connection) -> Fact:
    """Return what is verified of *connection*, by itself: the server would tell of the one from a pooler."""
    transport: Any = connection._transport  # type: ignore[attr-defined]  # no public name
    encrypted, peer = transport.get_extra_info("ssl_object"), transport.get_extra_info("peername")
    host = peer[0] if isinstance(peer, tuple) else f"/{peer or 'a socket'}"
    mode = client.encryption.mode or "prefer"
    verified: dict[str, Verifies] = {"verify-full": "certificate and name", "verify-ca": "certificate"}
    return tls_fact(
        verified.get(mode, "nothing") if encrypted is not None else None,
        [host],
        authority=client.encryption.authority,
        version=encrypted.version() if encrypted is not None else "",
        because=f"sslmode={mode}",
    )


def _login(client: Client) -> list[Fact]:
    return [Fact("login", f"a password, from {client.source}")] if client.source else []
