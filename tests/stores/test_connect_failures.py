"""Failures to connect, on every store: the same class of error and the same words, whatever its driver says."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("azure.servicebus")
pytest.importorskip("azure.storage.blob")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")

import asyncpg
import nats.errors as nats_driver
from azure.core.exceptions import HttpResponseError
from kazoo import exceptions as kazoo_driver
from redis import exceptions as redis_driver

from tenure import _connect_failures
from tenure._backends.azure_storage import client as azure
from tenure._backends.etcd import address as etcd
from tenure._backends.etcd import errors as etcd_errors
from tenure._backends.kubernetes import client as kubernetes
from tenure._backends.nats import address as nats
from tenure._backends.nats import errors as nats_errors
from tenure._backends.postgres import address as postgres_address
from tenure._backends.postgres import client as postgres
from tenure._backends.postgres.encryption import Encryption
from tenure._backends.rabbitmq import address as rabbitmq_address
from tenure._backends.rabbitmq import client as rabbitmq
from tenure._backends.rabbitmq import errors as rabbitmq_errors
from tenure._backends.redis import client as redis_client
from tenure._backends.servicebus import client as servicebus
from tenure._backends.servicebus import driver as servicebus_driver
from tenure._backends.zookeeper import errors as zookeeper
from tenure._connect_failures import Kind
from tenure._registry import BACKENDS, load
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable
from tests.durations import stretched, until
from tests.servers import free_port
from tests.servers.process import release
from tests.stores.test_tls import link_of, redirect, use

SECRET = "s3cret-of-the-server"

STORES = {
    "azure_storage": "azure://?connection_string_env=AZURE&timeout={timeout}",
    "etcd": f"etcd://u:{SECRET}@{{at}}/?timeout={{timeout}}",
    "kubernetes": "kubernetes://default?server=http://{at}&timeout={timeout}",
    "nats": f"nats://u:{SECRET}@{{at}}/?timeout={{timeout}}",
    "postgres": f"postgresql://u:{SECRET}@{{at}}/d?timeout={{timeout}}",
    "rabbitmq": f"amqp://u:{SECRET}@{{at}}/?timeout={{timeout}}",
    "redis": f"redis://:{SECRET}@{{at}}/0?timeout={{timeout}}",
    "redis, cluster": f"redis://:{SECRET}@{{at}}/0?cluster=yes&timeout={{timeout}}",
    "redis, sentinel": f"redis+sentinel://:{SECRET}@{{at}}/orders?timeout={{timeout}}",
    "servicebus": "servicebus://?connection_string_env=SERVICEBUS&timeout={timeout}",
    "servicebus, links": "servicebus://?connection_string_env=SERVICEBUS&timeout={timeout}",
    "zookeeper": f"zookeeper://u:{SECRET}@{{at}}/?timeout={{timeout}}",
}
"""Each store, as its URL names the server ``{at}``; ``peers:`` and ``sqlite:`` have tests of their own."""
OTHERS = {"memory", "peers", "sqlite"}

HOST = "orders.invalid"
SILENCE, LONG = 0.2, 60.0
"""Seconds to wait for a server that says nothing, and where nobody waits: the failure is told at once."""


@dataclass(frozen=True)
class Fault:
    """What keeps a client from a server, and what every store says of it; ``{host}`` is that of the URL."""

    says: str
    kind: type[TenureError] = Unavailable
    host: str = "127.0.0.1"
    code: int = 0
    """What the resolver says of the host; 0 if it is asked really."""
    listens: bool = False
    is_silent: bool = False
    """Whether it is noticed by the silence alone."""


FAULTS = {
    "unknown host": Fault("can't be reached.*: DNS knows no host {host}; check", host=HOST, code=socket.EAI_NONAME),
    "no resolver": Fault("can't be reached.*: no DNS server answers for {host}", host=HOST, code=socket.EAI_AGAIN),
    "impossible host": Fault("can't be the name of a host[:;] ", ConfigError, "x" * 64 + ".a"),
    "refused": Fault("can't be reached.*: Connection refused; check host and port, and whether .* runs$"),
    "no answer": Fault("no answer within [0-9.]+ s", listens=True, is_silent=True),
    "unconnected": Fault("no answer within [0-9.]+ s", is_silent=True),
}


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return what the resolver says of some hosts, by their names."""
    codes, resolve = dict[str, int](), socket.getaddrinfo

    def resolved(host: Any, *more: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if code := codes.get(name):
            raise socket.gaierror(code, "said by the test")
        return resolve(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return codes


@contextmanager
def port_of(fault: Fault) -> Iterator[int]:
    """Yield a port that answers as the fault has it."""
    if not fault.is_silent:
        port = free_port()
        try:
            yield port
        finally:
            release(port)
        return
    with socket.create_server(("127.0.0.1", 0), backlog=0 if not fault.listens else 100) as listening:
        port = listening.getsockname()[1]
        filling = list[socket.socket]()
        try:
            while not fault.listens and len(filling) < 10:  # until the system lets no further one in
                one = socket.socket()
                filling.append(one)
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            yield port
        finally:
            for one in filling:
                one.close()


async def told(name: str, fault: Fault, resolver: dict[str, int], patch: pytest.MonkeyPatch) -> TenureError:
    """Return what a store says of a fault."""
    if fault.code:
        resolver[fault.host] = fault.code
    with port_of(fault) as port:
        at = f"{fault.host}:{port}"
        endpoints = f"BlobEndpoint=https://{at}/mine;QueueEndpoint=https://{at}/mine"
        patch.setenv("AZURE", f"AccountName=mine;AccountKey=AAAA;{endpoints}")
        patch.setenv("SERVICEBUS", f"Endpoint=sb://{at};SharedAccessKeyName=mine;SharedAccessKey=AAAA")
        if "links" in name:
            redirect(patch, port)
        # kazoo looks for a server on and on: what it says comes at the end.
        waits = fault.is_silent or name == "zookeeper"
        timeout = SILENCE if fault.is_silent else stretched(0.5) if waits else LONG
        parsed = Url.parse(STORES[name].format(at=at, timeout=timeout))
        began = time.monotonic()
        with pytest.raises(TenureError) as caught:
            backend: Any = load(parsed).open(parsed)
            await (link_of(backend) if "links" in name else use(backend))
        assert waits or time.monotonic() - began < LONG / 2
    return caught.value


def complaint(error: TenureError, fault: Fault) -> str | None:
    """Return what is wrong with the *error* that a store gives for a fault; None if nothing is."""
    said = str(error)
    if type(error) is not fault.kind:
        return f"{type(error).__name__}: {said}"
    if not re.search(fault.says.format(host=re.escape(fault.host)), said) or "\n" in said or SECRET in said:
        return said
    return None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", STORES)
async def test_a_failure_to_connect_is_told_alike(
    resolver: dict[str, int], monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    assert complaint(await told(name, FAULTS[fault], resolver, monkeypatch), FAULTS[fault]) is None


@pytest.mark.parametrize("fault", ["unknown host", "no resolver", "refused"])
async def test_a_fleet_tells_of_members_that_can_not_be_reached(
    resolver: dict[str, int], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its error is one for all members: the reason of each follows."""
    has = FAULTS[fault]
    if has.code:
        resolver[has.host] = has.code
    with port_of(has) as port:
        monkeypatch.setitem(
            STORES, "peers", f"peers://{has.host}:{port},127.0.0.1:9?quorum=majority&ttl_max=1&insecure=yes"
        )
        parsed = Url.parse(STORES["peers"])
        backend: Any = load(parsed).open(parsed)

        async def tells() -> bool:
            with pytest.raises(Unavailable) as caught:
                await backend.leases.inspect("name")
            return bool(
                re.search(f"; {has.host}:{port} {has.says}".format(host=has.host).rstrip("$"), str(caught.value))
            )

        try:
            await until(tells)
            facts = {fact.name: fact.advice for fact in await backend.describe()}
            assert re.search(has.says.format(host=has.host), facts[f"connection to {has.host}:{port}"])
        finally:
            await backend.close()


def every_failure_is_a_refusal(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(_connect_failures, "_UNKNOWN", frozenset())
    return "unknown host"


def what_no_resolver_says_is_final(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(_connect_failures, "LASTING", frozenset(Kind))
    return "no resolver"


def refusals_are_taken_for_silence(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(_connect_failures, "_NUMBERS", dict.fromkeys(_connect_failures._NUMBERS, Kind.TIMED_OUT))
    return "refused"


def errors_are_not_unwrapped(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(_connect_failures, "chain_of", lambda error: iter([error]))
    return "refused"


@pytest.mark.parametrize(
    "plant",
    [
        every_failure_is_a_refusal,
        what_no_resolver_says_is_final,
        refusals_are_taken_for_silence,
        errors_are_not_unwrapped,
    ],
)
async def test_a_planted_wrong_mapping_is_found(
    resolver: dict[str, int], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], str]
) -> None:
    fault = FAULTS[plant(monkeypatch)]
    assert complaint(await told("redis", fault, resolver, monkeypatch), fault) is not None


@pytest.mark.parametrize("name", ["etcd", "kubernetes", "postgres", "rabbitmq", "redis"])
async def test_a_store_that_maps_by_itself_is_found(
    resolver: dict[str, int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that leaves the classifier out, or asks it too late, has words of its own."""
    monkeypatch.setattr(_connect_failures.Target, "failure", lambda target, error: None)
    fault = FAULTS["unknown host"]
    assert complaint(await told(name, fault, resolver, monkeypatch), fault) is not None


# --- logins and rights -------------------------------------------------------------------------------------------

Translated = Callable[[bool], TenureError]
"""Returns what a store makes of an answer, if the client has worked before or not."""

LOGIN, NONE, RIGHT = "refused the login", "requires a login, and got none; ", "does not permit this user "


def of_azure(code: str, status: int = 403) -> Translated:
    error: Any = HttpResponseError("no")
    error.status_code, error.error_code = status, code
    return lambda worked: azure.translate(error, Url.parse("azure://mine"), 5.0, worked=worked)


def of_etcd(text: str, code: int, login: str = "u:p@") -> Translated:
    address = etcd.address_of(Url.parse(f"etcd://{login}a"))
    error = etcd_errors.Refused(400, text, code)
    return lambda worked: etcd_errors.translate(error, address, prefix="a/", own=None, worked=worked, permitted=worked)


def of_kubernetes(status: int) -> Translated:
    def translated(worked: bool) -> TenureError:
        before = {("get", "a")} if worked else set[tuple[str, str]]()
        where = kubernetes.Where("https://a", "the URL", "b", 5.0, before)
        request = kubernetes.Request("get", "a")
        return kubernetes.translate(kubernetes.Answer(status, {"message": "no"}), request, where)

    return translated


def of_nats(error: Exception) -> Translated:
    return lambda worked: nats_errors.translate(error, nats.address_of(Url.parse("nats://a")), 5.0, worked=worked)


def of_postgres(error: Exception) -> Translated:
    url = Url.parse("postgresql://a/b")
    options, plain = url.options(postgres_address.Options), Encryption(None, None)
    return lambda worked: postgres.translate(error, url, options, plain, worked=worked, waited=1.0)


def of_rabbitmq(error: Exception) -> Translated:
    url = Url.parse("amqp://u:p@a/b")
    address = rabbitmq_address.address_of(url)
    return lambda worked: rabbitmq.translate(error, url, address, 5.0, worked=worked, user="ann")


def of_redis(error: Exception) -> Translated:
    return lambda worked: redis_client.translate(error, "redis://a:1/0", worked=worked, permitted=worked)


def of_servicebus(condition: str) -> Translated:
    url, error = Url.parse("servicebus://mine"), servicebus_driver.Refused(condition, "no")
    return lambda worked: servicebus.translate(error, url, 5.0, worked=worked)


def of_zookeeper(error: Exception, login: str = "") -> Translated:
    return lambda worked: zookeeper.translate(error, "zookeeper://a", login=login, worked=worked)


REFUSALS: list[tuple[str, str, Translated]] = [
    ("azure_storage", LOGIN, of_azure("AuthenticationFailed")),
    ("azure_storage", LOGIN, of_azure("SomethingNew")),
    ("azure_storage", NONE, of_azure("NoAuthenticationInformation", 401)),
    ("azure_storage", RIGHT, of_azure("AuthorizationPermissionMismatch")),
    ("etcd", LOGIN, of_etcd("authentication failed, invalid user ID or password", 3)),
    ("etcd", NONE, of_etcd("user name is empty", 3, login="")),
    ("etcd", RIGHT, of_etcd("permission denied", 7)),
    ("kubernetes", LOGIN, of_kubernetes(401)),
    ("kubernetes", RIGHT, of_kubernetes(403)),
    ("nats", LOGIN, of_nats(nats_driver.AuthorizationError())),
    ("nats", LOGIN, of_nats(nats_driver.Error("nats: 'Authentication Expired'"))),
    ("nats", RIGHT, of_nats(nats_errors.NotPermitted("permissions violation"))),
    ("postgres", LOGIN, of_postgres(asyncpg.InvalidPasswordError("no"))),
    ("postgres", LOGIN, of_postgres(asyncpg.InvalidAuthorizationSpecificationError("no"))),
    ("postgres", RIGHT, of_postgres(asyncpg.InsufficientPrivilegeError("no"))),
    ("rabbitmq", LOGIN, of_rabbitmq(rabbitmq_errors.ConnectionLost(403, "ACCESS_REFUSED"))),
    ("rabbitmq", RIGHT, of_rabbitmq(rabbitmq_errors.ChannelLost(403, "ACCESS_REFUSED"))),
    ("redis", LOGIN, of_redis(redis_driver.AuthenticationError("WRONGPASS"))),
    ("redis", NONE, of_redis(redis_driver.AuthenticationError("Authentication required."))),
    ("redis", RIGHT, of_redis(redis_driver.NoPermissionError("no"))),
    ("servicebus", RIGHT, of_servicebus("amqp:unauthorized-access")),
    ("servicebus", RIGHT, of_servicebus("com.microsoft:auth-failed")),
    ("zookeeper", LOGIN, of_zookeeper(kazoo_driver.AuthFailedError())),
    ("zookeeper", LOGIN, of_zookeeper(kazoo_driver.SessionClosedRequireSaslError(), "digest")),
    ("zookeeper", NONE, of_zookeeper(kazoo_driver.SessionClosedRequireSaslError())),
    ("zookeeper", RIGHT, of_zookeeper(kazoo_driver.NoAuthError())),
]
"""Each store's own answers about logins and rights; for Service Bus, a login is refused as a right is."""


def trouble(says: str, translated: Translated) -> str | None:
    """Return what is wrong with an error about a login or a right, before and after the client has worked."""
    for worked, kind in ((False, ConfigError), (True, Unavailable)):
        error = translated(worked)
        is_told = str(error).endswith(" (it worked before, so tenure tries again)") == worked
        if type(error) is not kind or says not in str(error) or "; " not in str(error) or not is_told:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(("name", "says", "translated"), REFUSALS)
def test_a_login_and_a_right_are_told_alike(name: str, says: str, translated: Translated) -> None:
    assert trouble(says, translated) is None


def test_every_store_has_logins_and_rights() -> None:
    assert {name for name, _, _ in REFUSALS} == {name.partition(",")[0] for name in STORES}


def a_login_is_retried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_connect_failures, "lasting", lambda text, *, worked: Unavailable(text))


def what_worked_is_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_connect_failures, "lasting", lambda text, *, worked: ConfigError(text))


@pytest.mark.parametrize("plant", [a_login_is_retried, what_worked_is_given_up])
def test_a_planted_wrong_class_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert all(trouble(says, translated) is not None for _, says, translated in REFUSALS)


def test_every_store_is_tried() -> None:
    found = {module.rpartition(".")[2] for module, _ in BACKENDS.values()}
    assert found == {name.partition(",")[0] for name in STORES} | OTHERS
