"""What ``tenure doctor`` says of a server that lets everybody in, if it is not on this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiormq")
pytest.importorskip("redis")
pytest.importorskip("aiohttp")
pytest.importorskip("nats")
pytest.importorskip("azure.storage.blob")

from tenure._backends import rabbitmq
from tenure._backends.azure_storage.address import connected
from tenure._backends.azure_storage.diagnosis import _login as azure_login
from tenure._backends.etcd import diagnosis as etcd
from tenure._backends.nats import address as nats_address
from tenure._backends.nats import diagnosis as nats
from tenure._backends.rabbitmq.diagnosis import _login_advice
from tenure._backends.redis.address import Options, address_of
from tenure._backends.redis.diagnosis import login_fact
from tenure._logins import Login
from tenure._secret import Secret
from tenure._url import Url, is_loopback
from tests.explained import facts_by_name
from tests.servers import RabbitMQ, shared


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("redis://10.0.0.7", "redis-no-login"),
        ("redis://redis.example:6380/2", "redis-no-login"),
        ("redis://localhost", ""),
        ("redis://[::1]", ""),
        ("redis://:hush@10.0.0.7", ""),
        ("redis://app:hush@10.0.0.7", ""),
        ("rediss://10.0.0.7?cert=a&key=b", ""),
        ("redis://10.0.0.7?password=hush", ""),
        ("redis+unix:///run/redis.sock", ""),
    ],
)
def test_a_redis_without_login_is_told(url: str, code: str) -> None:
    parsed = Url.parse(url)
    options = parsed.options(Options)
    address = address_of(parsed, options)
    fact = login_fact(address, options, [address.host])
    assert (fact.code if fact.advice else "") == code
    assert "hush" not in str(fact)


@pytest.mark.parametrize(
    ("user", "host", "warns"),
    [("guest", "10.0.0.7", True), ("guest", "127.0.0.2", False), ("guest", "localhost", False), ("app", "mq", False)],
)
def test_the_first_user_of_a_rabbitmq_elsewhere_is_told(user: str, host: str, warns: bool) -> None:
    client = SimpleNamespace(user=user, address=SimpleNamespace(host=host))
    assert bool(_login_advice(cast(Any, client))) == warns


async def test_the_warning_about_that_user_has_a_code() -> None:
    """A server at 0.0.0.0 is on this machine, too; but doctor takes that for another one."""
    parsed = Url.parse(shared(RabbitMQ).url.replace("127.0.0.1", "0.0.0.0"))
    backend = rabbitmq.open(parsed)
    try:
        facts = facts_by_name(await backend.describe())
    finally:
        await backend.close()
    assert facts["login"].value == "guest"
    assert (bool(facts["login"].advice), facts["login"].code) == (True, "rabbitmq-guest")


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("nats://10.0.0.7", "nats-no-login"),
        ("nats://127.0.0.1", "nats-no-login"),
        ("nats://app:hush@10.0.0.7", ""),
        ("nats://hush@10.0.0.7", ""),
    ],
)
def test_a_nats_without_login_is_told(url: str, code: str) -> None:
    parsed = Url.parse(url)
    address = nats_address.address_of(parsed)
    login = Login(address.username, address.password or address.token)
    fact = nats._login(parsed.options(nats_address.Options), login, "")
    assert (fact.code if fact.advice else "") == code
    assert "hush" not in str(fact)


@pytest.mark.parametrize(
    ("secret", "code"), [("AccountKey=aHVzaA==", "azure-account-key"), ("SharedAccessSignature=sig=hush", "")]
)
def test_an_account_key_of_azure_is_told(secret: str, code: str) -> None:
    address = connected(Secret(f"AccountName=mine;{secret}"))
    fact = azure_login(address, address.login)
    assert (fact.code if fact.advice else "") == code


@pytest.mark.parametrize(
    ("has_login", "cert", "code"), [(False, None, "etcd-no-login"), (True, None, ""), (False, "a.pem", "")]
)
def test_an_etcd_without_login_is_told(has_login: bool, cert: str | None, code: str) -> None:
    client = SimpleNamespace(has_login=has_login, options=SimpleNamespace(cert=cert))
    fact = etcd._login(cast(Any, client))
    assert (fact.code if fact.advice else "") == code


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("localhost", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.1", False), ("db", False)],
)
def test_loopback(host: str, is_here: bool) -> None:
    assert is_loopback(host) == is_here
