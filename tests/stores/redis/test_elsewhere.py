"""Servers that the URL does not name: what doctor says of them, and what they are told by TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tenure._backends import redis
from tenure._opened import Fact
from tenure._url import Url
from tenure.errors import TenureError
from tests.durations import stretched
from tests.explained import facts_by_name
from tests.servers import Authority, Redis, shared
from tests.servers.redis_answer import RedisAnswer
from tests.servers.tls_listener import TlsListener

ELSEWHERE = "0.0.0.0"
"""This machine, too; but no address of its loopback interface, so doctor takes it for another one."""
URLS = {"sentinel": "redis+sentinel://127.0.0.1:{port}/orders", "cluster": "redis://127.0.0.1:{port}?cluster=yes"}


def warned(fact: Fact) -> str:
    return fact.code if fact.advice else ""


@pytest.mark.parametrize(("host", "is_here"), [(ELSEWHERE, False), ("127.0.0.1", True)])
@pytest.mark.parametrize("kind", URLS)
async def test_doctor_looks_at_the_servers_that_have_the_data(kind: str, host: str, is_here: bool) -> None:
    """The sentinel, or the node that the URL names, is on this machine."""
    async with RedisAnswer(host, shared(Redis).port) as named:
        backend = redis.open(Url.parse(URLS[kind].format(port=named.port)))
        try:
            facts = facts_by_name(await backend.describe())
        finally:
            await backend.close()
    assert warned(facts["TLS"]) == ("" if is_here else "no-tls")
    assert warned(facts["login"]) == ("" if is_here else "redis-no-login")
    if kind == "sentinel":
        assert warned(facts["TLS of sentinels"]) == ""


@pytest.mark.parametrize("trusts", ["ca", "the machine"])
@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
async def test_a_server_that_is_named_by_a_trusted_one_must_be_trusted_itself(
    tmp_path: Path, kind: str, trusts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, other = Authority(), Authority("another")
    for folder in ("right", "foreign"):
        (tmp_path / folder).mkdir()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue(tmp_path / "right"))
    with TlsListener("tls", other.issue(tmp_path / "foreign")) as foreign:
        async with RedisAnswer("127.0.0.1", foreign.port, context) as named:
            url = URLS[kind].format(port=named.port).replace("redis", "rediss", 1).replace("//", "//:hush@")
            mark = "&" if "?" in url else "?"
            written = f"{url}{mark}timeout={stretched(0.5)}"
            if trusts == "ca":
                written += f"&ca={authority.certificate}"
            else:
                monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
            backend = redis.open(Url.parse(written))
            try:
                while not foreign.handshakes:
                    with pytest.raises(TenureError):
                        await backend.leases.inspect("name")
            finally:
                await backend.close()
    assert foreign.told == []
