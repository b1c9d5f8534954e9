"""TLS, on every store: an authority that is named is asked about every connection, and failures are told alike."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("azure.servicebus")
pytest.importorskip("azure.storage.blob")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")

import aiohttp.connector
from aiohttp import TCPConnector

from tenure._backends import postgres
from tenure._backends.peers.address import Settings
from tenure._backends.peers.diagnosis import tls_of as peers_tls
from tenure._backends.postgres.address import dsn_of
from tenure._backends.postgres.diagnosis import _tls as postgres_tls
from tenure._backends.postgres.encryption import Encryption
from tenure._registry import BACKENDS, load
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable
from tests.durations import stretched, until
from tests.servers import (
    Authority,
    Azurite,
    Etcd,
    Kubernetes,
    Nats,
    Postgres,
    RabbitMQ,
    Redis,
    ServiceBus,
    ZooKeeper,
    shared,
)
from tests.servers.tls_listener import Protocol, TlsListener

# A handshake that fails may leave its transport to the garbage collector, deep in the driver.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SECRET = "s3cret-of-the-server"


@dataclass(frozen=True)
class Store:
    """A store, as its URL names an authority: ``{at}`` is the server; ``{ca}``, ``{cert}`` and ``{key}`` are files."""

    url: str
    protocol: Protocol = "tls"
    plain: tuple[str, ...] = ()
    """Further URLs, that name an authority and ask for no TLS, or for less."""
    answer: bytes = b"HTTP/1.0 400 Bad Request\r\n\r\n"
    """What a server without TLS answers to a handshake."""
    authority: str = "ca=FILE"
    """What a message says about naming one."""
    certificate: str = "cert=FILE and key=FILE"
    """What it says about a client's certificate."""
    tells_of_certificates: bool = True
    """Whether messages have names and dates of a certificate: not where the driver makes the context of TLS."""


STORES: dict[str, Store] = {
    "etcd": Store(f"etcds://u:{SECRET}@{{at}}/?ca={{ca}}", plain=(f"etcd://u:{SECRET}@{{at}}/?ca={{ca}}",)),
    "kubernetes": Store(
        "kubernetes://default?server=https://{at}&ca={ca}",
        plain=("kubernetes://default?server=http://{at}&ca={ca}",),
        authority="or with ca=FILE beside server=",
        certificate="in the kubeconfig (client-certificate and client-key)",
    ),
    "nats": Store(
        f"nats://u:{SECRET}@{{at}}/?ca={{ca}}", "nats", plain=(f"nats://u:{SECRET}@{{at}}/?ca={{ca}}&tls=no",)
    ),
    "peers": Store(
        "peers://{at},127.0.0.1:9?quorum=majority&tls_ca={ca}&tls_cert={cert}&tls_key={key}",
        plain=(
            "peers://{at},127.0.0.1:9?quorum=majority&tls_ca={ca}",
            "peers://{at},127.0.0.1:9?quorum=majority&tls_ca=&tls_cert=&tls_key=",
        ),
    ),
    "postgres": Store(
        f"postgresql://u:{SECRET}@{{at}}/d?sslrootcert={{ca}}",
        "postgres",
        plain=tuple(
            f"postgresql://u:{SECRET}@{{at}}/d?sslrootcert={{ca}}&sslmode={mode}"
            for mode in ("disable", "allow", "prefer", "require")
        ),
        authority="sslrootcert=FILE",
        certificate="sslcert=FILE and sslkey=FILE",
        tells_of_certificates=False,
    ),
    "rabbitmq": Store(
        f"amqps://u:{SECRET}@{{at}}/?ca={{ca}}",
        plain=(f"amqp://u:{SECRET}@{{at}}/?ca={{ca}}",),
        answer=b"AMQP\0\0\x09\x01",
    ),
    "redis": Store(
        f"rediss://:{SECRET}@{{at}}/0?ca={{ca}}",
        plain=(
            f"redis://:{SECRET}@{{at}}/0?ca={{ca}}",
            f"redis+sentinel://:{SECRET}@{{at}}/orders?ca={{ca}}",
            f"rediss+sentinel://:{SECRET}@{{at}}/orders?ca={{ca}}&sentinel_password={SECRET}",
        ),
        answer=b"-ERR Protocol error\r\n",
    ),
    "zookeeper": Store(
        f"zookeeper://u:{SECRET}@{{at}}/?auth=sasl&tls=yes&ca={{ca}}",
        plain=(
            f"zookeeper://u:{SECRET}@{{at}}/?auth=sasl&ca={{ca}}",
            f"zookeeper://u:{SECRET}@{{at}}/?ca={{ca}}&tls=no",
        ),
        answer=b"",
    ),
}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def other_authority() -> Authority:
    """Return an authority that the URL does not name."""
    return Authority("another authority")


@pytest.fixture(scope="module")
def foreign(other_authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a server's certificate and key of an authority that the URL does not name."""
    return other_authority.issue(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cert, key = authority.issue(tmp_path_factory.mktemp("client"), "client", "clientAuth")
    return {"ca": authority.certificate, "cert": cert, "key": key}


# --- an authority is never ignored -------------------------------------------------------------------------------

Ask = Callable[[str], Awaitable[object]]


async def asked(url: str) -> object:
    """Open the backend of *url*, ask it for something, and close it."""
    parsed = Url.parse(url)
    return await use(load(parsed).open(parsed))


async def use(backend: Any) -> object:
    try:
        leases = getattr(backend, "leases", None)
        return await (leases.inspect("name") if leases is not None else backend.broker.stats("name"))
    finally:
        await backend.close()


async def told_to_a_foreign_server(
    ask: Ask, store: Store, url: str, files: dict[str, Path], own: tuple[Path, Path] | None
) -> list[bytes]:
    """Return what *ask* tells a server that is not the one it trusts; it must fail."""
    with TlsListener(store.protocol, own) as listener:
        written = url.format(at=f"127.0.0.1:{listener.port}", **files)
        written = f"{written}{'&' if '?' in written else '?'}{patience(written)}"
        # PostgreSQL and NATS without TLS say so before a handshake.
        shakes_hands = url == store.url and (own is not None or store.protocol == "tls")
        while True:
            with pytest.raises(TenureError):
                await ask(written)
            if listener.handshakes or not shakes_hands:
                break
        return listener.told


def patience(url: str) -> str:
    return "ttl_max=1" if url.startswith("peers") else f"timeout={stretched(0.5)}"


def every_url() -> list[tuple[str, str]]:
    return [(name, url) for name, store in STORES.items() for url in (store.url, *store.plain)]


@pytest.mark.parametrize("has_tls", [True, False])
@pytest.mark.parametrize(("name", "url"), every_url())
async def test_a_server_that_the_authority_has_not_signed_is_told_nothing(
    files: dict[str, Path], foreign: tuple[Path, Path], name: str, url: str, has_tls: bool
) -> None:
    own = foreign if has_tls else None
    assert await told_to_a_foreign_server(asked, STORES[name], url, files, own) == []


@pytest.mark.parametrize("name", STORES)
async def test_an_authority_that_the_machine_trusts_is_not_trusted_beside_the_one_that_is_named(
    files: dict[str, Path],
    foreign: tuple[Path, Path],
    other_authority: Authority,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(other_authority.certificate))
    assert await told_to_a_foreign_server(asked, STORES[name], STORES[name].url, files, foreign) == []


@pytest.mark.parametrize("has_tls", [True, False])
async def test_a_planted_store_that_ignores_the_authority_is_found(
    files: dict[str, Path], foreign: tuple[Path, Path], has_tls: bool
) -> None:
    async def as_libpq(url: str) -> object:
        parsed = Url.parse(url)
        backend = load(parsed).open(parsed)
        backend._client._dsn = dsn_of(parsed)
        backend._client.encryption = Encryption(None, None)
        return await use(backend)

    own = foreign if has_tls else None
    told = await told_to_a_foreign_server(as_libpq, STORES["postgres"], STORES["postgres"].url, files, own)
    assert any(b"user\0u\0" in one for one in told)


def test_every_store_that_can_name_an_authority_is_tried() -> None:
    found = set()
    for module in {module for module, _ in BACKENDS.values()}:
        options = importlib.import_module(f"{module}.address").Options
        if any(re.search(r"(^|_)ca$|root", field.name) for field in dataclasses.fields(options)):
            found.add(module.rpartition(".")[2])
    assert found == set(STORES)


# --- failures are told as such -----------------------------------------------------------------------------------

TOLD = STORES | {
    "azure": Store(
        "azure://?connection_string_env=AZURE",
        authority="SSL_CERT_FILE",
        certificate="or a proxy",
        tells_of_certificates=False,
    ),
    "redis+sentinel": replace(STORES["redis"], url="rediss+sentinel://{at}/orders?ca={ca}"),
    "redis, cluster": replace(STORES["redis"], url="rediss://{at}/?ca={ca}&cluster=yes"),
    "servicebus": Store(
        "servicebus://?connection_string_env=SERVICEBUS",
        authority="a proxy in between",
        certificate="or a proxy",
        tells_of_certificates=False,
    ),
    "servicebus, links": Store(
        "servicebus://?connection_string_env=SERVICEBUS",
        authority="a proxy in between",
        certificate="or a proxy",
        tells_of_certificates=False,
    ),
}
del TOLD["peers"]  # a fleet without this member may still answer: see below


@dataclass(frozen=True)
class Fault:
    """A server that no client should use, and what is said of it."""

    certificate: tuple[Path, Path] | None
    says: str
    demands: Path | None = None


@pytest.fixture(scope="module")
def faults(
    authority: Authority, foreign: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Fault]:
    def issued(host: str = "127.0.0.1", days: int = 2) -> tuple[Path, Path]:
        return authority.issue(tmp_path_factory.mktemp("server"), host, days=days)

    return {
        "unknown": Fault(foreign, "the server's certificate is not trusted ("),
        "another host": Fault(issued("elsewhere"), "the server's certificate is for another host ("),
        "expired": Fault(issued(days=-1), "the server's certificate has expired"),
        "no TLS": Fault(None, "the server "),
        "demanding": Fault(issued(), "the server requires a client's certificate (", demands=authority.certificate),
    }


@pytest.mark.parametrize("fault", ["unknown", "another host", "expired", "no TLS", "demanding"])
@pytest.mark.parametrize("name", TOLD)
async def test_a_failure_of_tls_is_told_as_such(
    faults: dict[str, Fault], authority: Authority, monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    store, has = TOLD[name], faults[fault]
    with TlsListener(store.protocol, has.certificate, demands=has.demands, plain_answer=store.answer) as listener:
        at = f"127.0.0.1:{listener.port}"
        _trust_and_name(monkeypatch, authority.certificate, at)
        if "links" in name:
            at = "127.0.0.1:5671"
            redirect(monkeypatch, listener.port)
        is_cut = name == "zookeeper" and fault == "no TLS"  # which may be the network's doing
        lasts = stretched(0.5) if is_cut else 20
        parsed = Url.parse(f"{store.url.format(at=at, ca=authority.certificate)}&timeout={lasts}")
        backend = load(parsed).open(parsed)
        with pytest.raises(Unavailable if is_cut else ConfigError) as caught:
            await (link_of(backend) if "links" in name else use(backend))
        await backend.close()
    said = str(caught.value)
    assert said.startswith(f"the TLS handshake with {at} failed: {has.says}"), said
    advice = {"unknown": store.authority, "demanding": store.certificate, "another host": "name the host as the"}
    assert advice.get(fault, "") in said
    assert _CERTIFICATES.get(fault, "") in said or not store.tells_of_certificates
    assert "\n" not in said
    assert SECRET not in said


_CERTIFICATES = {
    "unknown": "; it names 127.0.0.1; issued by another authority); ",
    "another host": "; it names elsewhere); ",
    "expired": " UTC; it names 127.0.0.1); renew it",
}
"""What is said of a certificate besides."""


def _trust_and_name(monkeypatch: pytest.MonkeyPatch, ca: Path, at: str) -> None:
    """Let the stores without an option for it trust an authority, and find the listener."""
    trust(monkeypatch, ca)
    endpoints = f"BlobEndpoint=https://{at}/mine;QueueEndpoint=https://{at}/mine"
    monkeypatch.setenv("AZURE", f"AccountName=mine;AccountKey=AAAA;{endpoints}")
    monkeypatch.setenv("SERVICEBUS", f"Endpoint=sb://{at};SharedAccessKeyName=mine;SharedAccessKey=AAAA")


def trust(monkeypatch: pytest.MonkeyPatch, ca: Path) -> None:
    """Let this machine trust an authority; also aiohttp, which reads those of the machine when it is imported."""
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    context, context_for = ssl.create_default_context(), TCPConnector._get_ssl_context
    machines = aiohttp.connector._SSL_CONTEXT_VERIFIED

    def trusting(connector: TCPConnector, request: Any) -> ssl.SSLContext | None:
        found = context_for(connector, request)
        return context if found is machines else found

    monkeypatch.setattr(TCPConnector, "_get_ssl_context", trusting)


def redirect(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let the port of Service Bus, which can't be chosen, be *port*."""
    connect: Any = asyncio.open_connection

    async def elsewhere(**options: Any) -> Any:
        return await connect(**{**options, "port": port})

    monkeypatch.setattr(asyncio, "open_connection", elsewhere)


async def link_of(backend: Any) -> object:
    namespace = backend._namespace
    try:
        return await namespace.run(partial(namespace.sender, "orders"))
    finally:
        await backend.close()


@pytest.mark.parametrize("name", ["etcd", "kubernetes", "nats", "postgres", "rabbitmq", "redis", "zookeeper"])
async def test_a_file_that_has_no_certificates_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "ca.pem").write_text("no certificates")
    with TlsListener(STORES[name].protocol, None) as listener, pytest.raises(ConfigError) as caught:
        await asked(STORES[name].url.format(at=f"127.0.0.1:{listener.port}", ca=tmp_path / "ca.pem"))
    assert "certificate" in str(caught.value).lower()
    assert "handshake" not in str(caught.value)


@pytest.mark.parametrize("fault", ["unknown", "another host", "expired", "demanding"])
async def test_a_member_of_a_fleet_tells_of_tls(
    faults: dict[str, Fault], files: dict[str, Path], foreign: tuple[Path, Path], fault: str
) -> None:
    """The client's own certificate is one that only the demanding server refuses."""
    has = faults[fault]
    with TlsListener("tls", has.certificate, demands=has.demands) as listener:
        at = f"127.0.0.1:{listener.port}"
        cert, key = foreign
        parsed = Url.parse(
            f"peers://{at},127.0.0.1:9?quorum=majority&tls_ca={files['ca']}&tls_cert={cert}&tls_key={key}&ttl_max=1"
        )
        backend = load(parsed).open(parsed)
        says = "the server refuses the client's certificate (" if fault == "demanding" else has.says

        async def tells() -> bool:
            with pytest.raises(Unavailable) as caught:
                await backend.leases.inspect("name")
            return f"; the TLS handshake with {at} failed: {says}" in str(caught.value)

        try:
            await until(tells)
        finally:
            await backend.close()


# --- what doctor says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Azurite, Etcd, Kubernetes, Nats, Postgres, RabbitMQ, Redis, ServiceBus, ZooKeeper])
async def test_doctor_says_what_is_verified(kind: Any) -> None:
    url = shared(kind).url
    if kind is Postgres:
        await postgres.migrate(url)
    parsed = Url.parse(url)
    backend = load(parsed).open(parsed)
    try:
        [told] = [fact.value for fact in await backend.describe() if fact.name == "TLS"]
    finally:
        await backend.close()
    assert told == "no TLS: the connection stays on this machine"


@pytest.mark.parametrize("kind", [Azurite, Etcd, Kubernetes, Nats, RabbitMQ, Redis, ServiceBus, ZooKeeper])
async def test_doctor_tells_of_a_server_elsewhere_without_tls(kind: Any) -> None:
    """A server at 0.0.0.0 is on this machine, too; but doctor takes that for another one."""
    parsed = Url.parse(shared(kind).url.replace("127.0.0.1", "0.0.0.0"))
    backend = load(parsed).open(parsed)
    try:
        [fact] = [fact for fact in await backend.describe() if fact.name == "TLS"]
    finally:
        await backend.close()
    assert (bool(fact.advice), fact.code) == (True, "no-tls")


def test_doctor_tells_of_members_elsewhere_without_tls() -> None:
    settings = Settings.of(Url.parse("peers://store.example:7000,127.0.0.1:7000?quorum=majority&insecure=yes"))
    assert peers_tls(settings).code == "no-tls"


@pytest.mark.parametrize(("peer", "code"), [(("192.0.2.7", 5432), "no-tls"), (("127.0.0.1", 5432), ""), ("", "")])
async def test_doctor_tells_of_a_postgresql_elsewhere_without_tls(peer: object, code: str) -> None:
    """Where it is, the connection knows: it may be to the second host of the URL."""
    told = {"ssl_object": None, "peername": peer}
    connection = SimpleNamespace(_transport=SimpleNamespace(get_extra_info=told.get))
    fact = await postgres_tls(cast(Any, SimpleNamespace(encryption=Encryption(None, None))), cast(Any, connection))
    assert (fact.code if fact.advice else "") == code
