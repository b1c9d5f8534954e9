"""TLS, on every store: certificates for other hosts, and whom it trusts without an authority in the URL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("azure.servicebus")
pytest.importorskip("azure.storage.blob")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")

from tenure._registry import load
from tenure._url import Url
from tenure.errors import TenureError
from tests.durations import stretched
from tests.servers import Authority
from tests.servers.tls_listener import TlsListener
from tests.stores.test_tls import STORES, Store, asked, link_of, redirect, told_to_a_foreign_server, trust, use

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

UNCHECKED = {
    "etcd": "check_hostname=false",
    "postgres": "sslmode=verify-ca",
    "rabbitmq": "check_hostname=false",
    "redis": "check_hostname=false",
    "zookeeper": "check_hostname=false",
}
"""Stores that have an option for not verifying the name, and that option; docs/security.md lists them."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cert, key = authority.issue(tmp_path_factory.mktemp("client"), "client", "clientAuth")
    return {"ca": authority.certificate, "cert": cert, "key": key}


@pytest.fixture(scope="module")
def misnamed(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a certificate and its key, of the authority that the URL names, for a host that it does not name."""
    return authority.issue(tmp_path_factory.mktemp("misnamed"), "another.example")


@pytest.mark.parametrize("name", STORES)
async def test_a_certificate_for_another_host_is_told_nothing(
    files: dict[str, Path], misnamed: tuple[Path, Path], name: str
) -> None:
    assert await told_to_a_foreign_server(asked, STORES[name], STORES[name].url, files, misnamed) == []


@pytest.mark.parametrize(("name", "option"), UNCHECKED.items())
async def test_only_the_options_that_are_listed_switch_that_off(
    files: dict[str, Path], misnamed: tuple[Path, Path], name: str, option: str
) -> None:
    url = f"{STORES[name].url}&{option}"
    assert await told_to_a_foreign_server(asked, STORES[name], url, files, misnamed)


@pytest.mark.parametrize(("name", "option"), UNCHECKED.items())
async def test_they_switch_off_nothing_else(files: dict[str, Path], tmp_path: Path, name: str, option: str) -> None:
    """A server of another authority is told nothing, whatever its name."""
    foreign = Authority("another authority").issue(tmp_path)
    url = f"{STORES[name].url}&{option}"
    assert await told_to_a_foreign_server(asked, STORES[name], url, files, foreign) == []


@pytest.mark.parametrize(
    ("written", "is_told"),
    [("none", True), ("CERT_NONE", True), ("optional", False), ("CERT_OPTIONAL", False), ("required", False)],
)
async def test_redis_verifies_its_server_unless_the_url_says_none(
    files: dict[str, Path], genuine: tuple[Path, Path], written: str, is_told: bool
) -> None:
    """As redis-py and Celery write it; to a client, ``optional`` is ``required``."""
    store = replace(STORES["redis"], url=f"rediss://:hush@{{at}}/0?ssl_cert_reqs={written}")
    told = await told_to_a_foreign_server(asked, store, store.url, files, genuine)
    assert bool(told) == is_told


# --- without an authority ----------------------------------------------------------------------------------------

TRUSTS_THE_MACHINE = {
    "etcd": "etcds://u:hush@{at}/",
    "kubernetes": "kubernetes://default?server=https://{at}",
    "nats": "nats://u:hush@{at}/?tls=yes",
    "nats, required": "nats://u:hush@{at}/",  # by the server, which tells so before a login
    "postgres": "postgresql://u:hush@{at}/d?sslrootcert=system",
    "rabbitmq": "amqps://u:hush@{at}/",
    "redis": "rediss://:hush@{at}/0",
    "zookeeper": "zookeeper://u:hush@{at}/?auth=sasl&tls=yes",
}
"""URLs that name no authority, and use TLS: they ask for it, or the server does."""
PLAIN = {"nats": "nats://u:hush@{at}/", "postgres": "postgresql://u:hush@{at}/d"}
"""URLs with which a server without TLS is told the login; docs/security.md says so."""


@pytest.fixture(scope="module")
def genuine(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a certificate and its key, of the authority, for the host of the URL."""
    return authority.issue(tmp_path_factory.mktemp("genuine"))


def trusting_the_machine(name: str) -> Store:
    return replace(STORES[name.partition(",")[0]], url=TRUSTS_THE_MACHINE[name])


@pytest.mark.parametrize("name", TRUSTS_THE_MACHINE)
async def test_without_an_authority_a_server_that_the_machine_does_not_trust_is_told_nothing(
    files: dict[str, Path], genuine: tuple[Path, Path], name: str
) -> None:
    store = trusting_the_machine(name)
    assert await told_to_a_foreign_server(asked, store, store.url, files, genuine) == []


@pytest.mark.parametrize("name", TRUSTS_THE_MACHINE)
async def test_without_an_authority_those_of_the_machine_are_trusted(
    monkeypatch: pytest.MonkeyPatch,
    authority: Authority,
    files: dict[str, Path],
    genuine: tuple[Path, Path],
    misnamed: tuple[Path, Path],
    name: str,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    store = trusting_the_machine(name)
    assert await told_to_a_foreign_server(asked, store, store.url, files, genuine)
    assert await told_to_a_foreign_server(asked, store, store.url, files, misnamed) == []


AZURE = {"azure": "azure:", "servicebus": "servicebus:", "servicebus, links": "servicebus:"}
"""URLs of services that are always asked by TLS; their connection strings name the server, and none an authority."""


@pytest.mark.parametrize("name", AZURE)
async def test_services_of_azure_are_told_nothing_unless_the_machine_trusts_them(
    monkeypatch: pytest.MonkeyPatch,
    authority: Authority,
    genuine: tuple[Path, Path],
    misnamed: tuple[Path, Path],
    name: str,
) -> None:
    assert await told_to_azure(name, genuine) == []
    trust(monkeypatch, authority.certificate)
    assert await told_to_azure(name, genuine)
    assert await told_to_azure(name, misnamed) == []


async def told_to_azure(name: str, own: tuple[Path, Path]) -> list[bytes]:
    """Return what a service of Azure with the certificate *own* is told, by a request that must fail."""
    with TlsListener("tls", own) as listener, pytest.MonkeyPatch.context() as monkeypatch:
        at = f"127.0.0.1:{listener.port}"
        if "links" in name:
            redirect(monkeypatch, listener.port)
        endpoints = f"BlobEndpoint=https://{at}/mine;QueueEndpoint=https://{at}/mine"
        monkeypatch.setenv("AZURE", f"AccountName=mine;AccountKey=AAAA;{endpoints}")
        monkeypatch.setenv("SERVICEBUS", f"Endpoint=sb://{at};SharedAccessKeyName=mine;SharedAccessKey=AAAA")
        variable = name.partition(",")[0].upper()
        parsed = Url.parse(f"{AZURE[name]}?connection_string_env={variable}&timeout={stretched(0.5)}")
        while not listener.handshakes:
            backend = load(parsed).open(parsed)
            with pytest.raises(TenureError):
                await (link_of(backend) if "links" in name else use(backend))
        return listener.told


@pytest.mark.parametrize("name", PLAIN)
async def test_without_options_a_server_without_tls_is_used(files: dict[str, Path], name: str) -> None:
    store = replace(STORES[name], url=PLAIN[name])
    assert await told_to_a_foreign_server(asked, store, store.url, files, None)
