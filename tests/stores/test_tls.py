"""TLS, on every store: an authority that is named is asked about every connection."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")

from tenure._backends.postgres.address import dsn_of
from tenure._backends.postgres.encryption import Encryption
from tenure._registry import BACKENDS, load
from tenure._url import Url
from tenure.errors import TenureError
from tests.servers import Authority
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


STORES: dict[str, Store] = {
    "etcd": Store(f"etcds://u:{SECRET}@{{at}}/?ca={{ca}}", plain=(f"etcd://u:{SECRET}@{{at}}/?ca={{ca}}",)),
    "kubernetes": Store(
        "kubernetes://default?server=https://{at}&ca={ca}", plain=("kubernetes://default?server=http://{at}&ca={ca}",)
    ),
    "nats": Store(
        f"nats://u:{SECRET}@{{at}}/?ca={{ca}}", "nats", plain=(f"nats://u:{SECRET}@{{at}}/?ca={{ca}}&tls=no",)
    ),
    "peers": Store(
        "peers://{at},127.0.0.1:9?tls_ca={ca}&tls_cert={cert}&tls_key={key}",
        plain=("peers://{at},127.0.0.1:9?tls_ca={ca}", "peers://{at},127.0.0.1:9?tls_ca=&tls_cert=&tls_key="),
    ),
    "postgres": Store(
        f"postgresql://u:{SECRET}@{{at}}/d?sslrootcert={{ca}}",
        "postgres",
        plain=tuple(
            f"postgresql://u:{SECRET}@{{at}}/d?sslrootcert={{ca}}&sslmode={mode}"
            for mode in ("disable", "allow", "prefer", "require")
        ),
    ),
    "rabbitmq": Store(f"amqps://u:{SECRET}@{{at}}/?ca={{ca}}", plain=(f"amqp://u:{SECRET}@{{at}}/?ca={{ca}}",)),
    "redis": Store(
        f"rediss://:{SECRET}@{{at}}/0?ca={{ca}}",
        plain=(
            f"redis://:{SECRET}@{{at}}/0?ca={{ca}}",
            f"redis+sentinel://:{SECRET}@{{at}}/orders?ca={{ca}}",
            f"rediss+sentinel://:{SECRET}@{{at}}/orders?ca={{ca}}&sentinel_password={SECRET}",
        ),
    ),
    "zookeeper": Store(
        f"zookeeper://u:{SECRET}@{{at}}/?auth=sasl&tls=yes&ca={{ca}}",
        plain=(
            f"zookeeper://u:{SECRET}@{{at}}/?auth=sasl&ca={{ca}}",
            f"zookeeper://u:{SECRET}@{{at}}/?ca={{ca}}&tls=no",
        ),
    ),
}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a server's certificate and key of an authority that the URL does not name."""
    return Authority("another authority").issue(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cert, key = authority.issue(tmp_path_factory.mktemp("client"), "client", "clientAuth")
    return {"ca": authority.certificate, "cert": cert, "key": key}


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
        with pytest.raises(TenureError):
            await ask(f"{written}{'&' if '?' in written else '?'}{patience(written)}")
        return listener.told


def patience(url: str) -> str:
    return "ttl_max=1" if url.startswith("peers") else "timeout=0.5"


def every_url() -> list[tuple[str, str]]:
    return [(name, url) for name, store in STORES.items() for url in (store.url, *store.plain)]


@pytest.mark.parametrize("has_tls", [True, False])
@pytest.mark.parametrize(("name", "url"), every_url())
async def test_a_server_that_the_authority_has_not_signed_is_told_nothing(
    files: dict[str, Path], foreign: tuple[Path, Path], name: str, url: str, has_tls: bool
) -> None:
    own = foreign if has_tls else None
    assert await told_to_a_foreign_server(asked, STORES[name], url, files, own) == []


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
