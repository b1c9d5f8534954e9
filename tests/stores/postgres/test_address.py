"""Options of libpq and of what services print: what the server gets of them, and what ``tenure doctor`` says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("asyncpg")

from tenure._backends import postgres
from tenure._backends.postgres.address import dsn_of, options_of
from tenure._opened import Fact
from tenure._url import Url
from tenure.errors import ConfigError
from tests.explained import facts_by_name
from tests.servers import Authority, Postgres, private, shared
from tests.servers.pgbouncer import PgBouncer

SET_ASIDE = (
    "channel_binding=prefer&client_encoding=latin1&fallback_application_name=x&gssencmode=prefer&keepalives=0"
    "&keepalives_count=3&keepalives_idle=30&keepalives_interval=10&load_balance_hosts=random&sslcompression=1&sslsni=1"
    "&supa=base-pooler.x&target_session_attrs=any&tcp_user_timeout=9000&uselibpqcompat=true"
)


def test_what_is_set_aside_is_not_told_to_the_driver() -> None:
    url = Url.parse(f"postgresql://u@h/d?{SET_ASIDE}&pgbouncer=true&options=-cx%3D1&sslmode=require")
    assert dsn_of(url).reveal() == "postgresql://u@h/d?sslmode=require"
    assert options_of(url).session_attrs == "read-write"


def test_a_pooler_by_transaction_has_no_prepared_statements_and_no_listeners() -> None:
    def chosen(query: str) -> tuple[bool, bool]:
        options = options_of(Url.parse(f"postgresql://u@h/d?{query}"))
        return options.prepared, options.listen

    assert chosen("pgbouncer=true") == (False, False)
    assert chosen("pgbouncer=true&prepared=true") == (True, False)
    assert chosen("pgbouncer=true&listen=true&prepared=false") == (False, True)
    assert chosen("pgbouncer=false") == (True, True)


async def test_doctor_names_what_is_set_aside() -> None:
    facts = await described(f"{(await migrated()).url}?{SET_ASIDE}")
    named = [one.partition("=")[0] for one in SET_ASIDE.split("&")]
    for name in named:
        fact = facts[f"option {name}"]
        assert (fact.value.startswith("set aside: "), fact.advice) == (True, "")
    assert "option pgbouncer" not in facts
    plain = await described((await migrated()).url)
    assert not [name for name in plain if name.startswith("option ")]


async def test_options_are_told_to_the_server_and_change_nothing_of_ours() -> None:
    server = await migrated()
    hostile = (
        "-csearch_path%3Dx,public -cstatement_timeout%3D1 -cdefault_transaction_isolation%3Dserializable"
        " -capplication_name%3Danother --work_mem%3D9MB"
    )
    backend = postgres.open(Url.parse(f"{server.url}?timeout=30&options={hostile.replace(' ', '%20')}"))
    client = backend.leases._client
    try:
        names = ("search_path", "work_mem", "statement_timeout", "default_transaction_isolation", "application_name")
        [row] = await client.fetch("SELECT " + ", ".join(f"current_setting('{name}') AS {name}" for name in names))
        assert dict(row) == {
            "search_path": "x,public",
            "work_mem": "9MB",
            "statement_timeout": "30s",
            "default_transaction_isolation": "read committed",
            "application_name": "tenure",
        }
        shown = f"{backend.leases._client.url}{await backend.describe()}"
        assert "statement_timeout=1" not in shown
        assert "options=***" in shown
        assert (await backend.broker.stats("orders")).ready == 0
    finally:
        await backend.close()


async def test_a_pooler_that_takes_no_options_is_told_of() -> None:
    with private(PgBouncer, of=await migrated()) as pooler:
        backend = postgres.open(Url.parse(f"{pooler.url}?pgbouncer=true&options=-cgeqo%3Doff"))
        try:
            with pytest.raises(ConfigError, match=r"refused its options= .*; a pooler takes few of them, or none"):
                await backend.leases.inspect("name")
        finally:
            await backend.close()


async def test_a_pooler_by_transaction_is_used_as_its_service_prints_it() -> None:
    with private(PgBouncer, of=await migrated()) as pooler:
        facts = await described(f"{pooler.url}?pgbouncer=true")
        assert facts["schema"].value.startswith("tenure, ")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def guarded(authority: Authority) -> Iterator[Postgres]:
    with private(Postgres, authority=authority, password="s3cret") as server:
        yield server


async def test_doctor_says_what_holds_in_place_of_a_binding(guarded: Postgres, authority: Authority) -> None:
    url = f"{guarded.url}?sslmode=require&channel_binding=require&sslrootcert={authority.certificate}"
    await postgres.migrate(url)
    facts = await described(url)
    assert facts["channel_binding"] == Fact(
        "channel_binding",
        "require: the driver has none, so the server's certificate and name are verified in its place (verify-full)",
    )
    assert "certificate and name are verified" in facts["TLS"].value
    assert "option channel_binding" not in facts


async def migrated() -> Postgres:
    server = shared(Postgres)
    await postgres.migrate(server.url)
    return server


async def described(url: str) -> dict[str, Fact]:
    backend = postgres.open(Url.parse(url))
    try:
        return facts_by_name(await backend.describe())
    finally:
        await backend.close()
