"""Certificates that are replaced while a backend is used: each new connection uses those that are there by then.

A proxy speaks TLS for each server. Both certificates, the client's and the server's, and their authority are replaced
together, and every connection is broken: what was held is held on.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")
pytest.importorskip("yaml")

import asyncpg.connect_utils
import yaml

import tenure
from tenure._backends import postgres
from tenure._backends.kubernetes import client as kubernetes
from tenure._lease import Grant, Granted
from tenure._queue.outgoing import Outgoing
from tenure._registry import load
from tenure._tls_context import ReloadingContext
from tenure._tls_failures import OwnCertificate
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable
from tests.durations import ANSWERED_WITHIN, stretched, until
from tests.servers import Authority, Etcd, Kubernetes, Nats, Postgres, RabbitMQ, Redis, ZooKeeper, free_port, shared
from tests.servers.certificates import CertificateFiles
from tests.servers.gate import HttpGate
from tests.servers.rabbitmq import VHOST
from tests.servers.redis_answer import RedisAnswer
from tests.servers.tls_listener import Protocol, TlsListener
from tests.servers.tls_proxy import TlsProxy

# A handshake that fails may leave its transport to the garbage collector, deep in the driver.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LASTS = 30.0
"""Seconds of a lease that no test waits for."""
REFUSED_MAX = 3
"""Connections, at most, that are tried with certificates of before."""


@dataclass(frozen=True)
class Store:
    """A store, as its URL names the proxy (``{at}``) and files."""

    server: Any
    url: str
    protocol: Protocol = "tls"
    is_found: bool = False
    """Whether a server that the URL names tells where it is: also through TLS."""


_FILES = "ca={ca}&cert={cert}&key={key}"
STORES = {
    "etcd": Store(Etcd, f"etcds://{{at}}/?{_FILES}"),
    "kubernetes": Store(Kubernetes, "kubernetes://default?kubeconfig={config}"),
    "kubernetes, in one file": Store(Kubernetes, "kubernetes://default?kubeconfig={data}"),
    "nats": Store(Nats, f"nats://{{at}}/?{_FILES}", "nats"),
    "postgres": Store(
        Postgres,
        "postgresql://postgres@{at}/postgres?sslrootcert={ca}&sslcert={cert}&sslkey={key}",
        "postgres",
    ),
    "rabbitmq": Store(RabbitMQ, f"amqps://guest:guest@{{at}}/{VHOST}?{_FILES}"),
    "redis": Store(Redis, f"rediss://{{at}}/0?{_FILES}"),
    "redis, cluster": Store(Redis, f"rediss://{{at}}/0?cluster=yes&{_FILES}", is_found=True),
    "redis, sentinel": Store(Redis, f"rediss+sentinel://{{at}}/primary?{_FILES}", is_found=True),
    "zookeeper": Store(ZooKeeper, f"zookeeper://{{at}}/?tls=yes&{_FILES}"),
}


def write_kubeconfigs(folder: Path, port: int, files: CertificateFiles) -> dict[str, Path]:
    """Write a kubeconfig that names the files, and one that has what is in them."""
    named = {"certificate-authority": "ca", "client-certificate": "cert", "client-key": "key"}
    path = {option: str(files.names[name]) for option, name in named.items()}
    data = {f"{option}-data": b64encode(files.names[name].read_bytes()).decode() for option, name in named.items()}
    written = {}
    for name, has in (("config", path), ("data", data)):
        [authority, *user] = has.items()
        content = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}", authority[0]: authority[1]}}],
            "users": [{"name": "u", "user": dict(user)}],
        }
        written[name] = folder / name
        written[name].write_text(yaml.safe_dump(content))
        written[name].chmod(0o600)
    return written


class Held:
    """What a backend holds: a lease; or, in a store without leases, a message that waits."""

    def __init__(self, backend: Any, name: str) -> None:
        self._backend = backend
        self._name = name
        self._grant: Grant | None = None

    async def take(self) -> None:
        leases = getattr(self._backend, "leases", None)
        if leases is None:
            await self._backend.broker.send(self._name, [Outgoing(b"before")])
            return
        granted = await leases.acquire(self._name, "me", LASTS)
        assert isinstance(granted, Granted)
        self._grant = granted.grant

    async def hold_on(self) -> None:
        """Use it once more, over a connection that works."""

        async def is_used() -> bool:
            with suppress(Unavailable):  # one of several connections that were broken
                await self.use()
                return True
            return False

        await until(is_used)

    async def use(self) -> None:
        """Use it, and require that it is the same."""
        if self._grant is not None:
            assert await self._backend.leases.renew([self._grant], LASTS) == [Granted(self._grant)]
            return
        claim = await self._backend.broker.receive(self._name, 1, LASTS)
        assert [delivery.body for delivery in claim.deliveries] == [b"before"]


@dataclass(frozen=True)
class Running:
    """A backend that holds something, over TLS by proxies."""

    held: Held
    files: CertificateFiles
    proxies: Sequence[TlsProxy]
    folder: Path

    def renew(self) -> None:
        """Replace every certificate and the authority, on both sides."""
        self.show(*self.files.renew())

    def show(self, authority: Authority, own: tuple[Path, Path]) -> None:
        for proxy in self.proxies:
            proxy.show(own, authority.certificate)
        write_kubeconfigs(self.folder, self.proxies[-1].port, self.files)

    async def sever(self) -> None:
        """Break every connection."""
        await asyncio.gather(*(proxy.sever() for proxy in self.proxies))

    @property
    def refused(self) -> int:
        """How many handshakes have failed since the certificates were replaced."""
        return sum(proxy.refused for proxy in self.proxies)


@asynccontextmanager
async def running(name: str, folder: Path) -> AsyncIterator[Running]:
    """Connect to a store with the first certificates, and hold something there."""
    store = STORES[name]
    server = shared(store.server)
    if store.server is Postgres:
        await postgres.migrate(server.url)
    files = CertificateFiles(folder)
    authority, own = files.renew()
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(TlsProxy(server.port, store.protocol))]
        if store.is_found:
            answer = await stack.enter_async_context(RedisAnswer("127.0.0.1", proxies[0].port))
            proxies.append(await stack.enter_async_context(TlsProxy(answer.port, store.protocol)))
        asked = proxies[-1].port
        url = store.url.format(at=f"127.0.0.1:{asked}", **files.names, **write_kubeconfigs(folder, asked, files))
        for proxy in proxies:
            proxy.show(own, authority.certificate)
        parsed = Url.parse(f"{url}&timeout={ANSWERED_WITHIN}")
        backend = load(parsed).open(parsed)
        stack.push_async_callback(backend.close)
        held = Held(backend, f"held-{uuid4().hex[:8]}")
        await held.take()
        yield Running(held, files, proxies, folder)


async def hold_on_through_a_renewal(name: str, folder: Path) -> None:
    """Let a backend use a store whose certificates are replaced; fail unless it goes on with what it has held."""
    async with running(name, folder) as store:
        store.renew()
        await store.sever()
        holding = asyncio.create_task(store.held.hold_on())
        try:
            await until(lambda: holding.done() or store.refused > REFUSED_MAX)
            assert store.refused <= REFUSED_MAX, "new connections are not made with the new certificates"
            await holding
            assert store.proxies[0].accepted
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)


@pytest.mark.parametrize("name", STORES)
async def test_what_is_held_is_held_on_while_all_certificates_are_replaced(name: str, tmp_path: Path) -> None:
    await hold_on_through_a_renewal(name, tmp_path)


@pytest.mark.parametrize("name", STORES)
async def test_a_planted_store_that_reads_its_files_once_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReloadingContext, "latest", lambda context: context._settings.context)
    driver: Any = asyncpg.connect_utils
    kept, read = dict[str, Any](), driver._parse_connect_dsn_and_args

    def read_once(**options: Any) -> Any:
        addresses, parameters, *rest = read(**options)
        return addresses, parameters._replace(ssl=kept.setdefault(options["dsn"], parameters.ssl)), *rest

    monkeypatch.setattr(driver, "_parse_connect_dsn_and_args", read_once)
    with pytest.raises(AssertionError, match="new connections are not made with the new certificates"):
        await hold_on_through_a_renewal(name, tmp_path)


@pytest.mark.parametrize("name", [name for name in STORES if name != "kubernetes, in one file"])
async def test_files_that_are_gone_for_a_moment_end_nothing(name: str, tmp_path: Path) -> None:
    """What was read before is used; on PostgreSQL, whose driver reads them itself, there is no connection meanwhile."""
    async with running(name, tmp_path) as store:
        (tmp_path / "..data").rename(tmp_path / "..away")
        await store.sever()
        if name == "postgres":
            with suppress(Unavailable):  # the connection that was broken
                await store.held.use()
            with pytest.raises(Unavailable, match="it worked before, so tenure tries again"):
                await store.held.use()
            (tmp_path / "..away").rename(tmp_path / "..data")
        await store.held.hold_on()


# --- a certificate that has expired -------------------------------------------------------------------------------


@pytest.mark.parametrize("says_why", [True, False])
@pytest.mark.parametrize("name", [name for name, store in STORES.items() if not store.is_found])
async def test_a_certificate_of_the_client_that_has_expired_is_told(name: str, tmp_path: Path, says_why: bool) -> None:
    """Whether the server sends an alert, or just closes the connection."""
    store, files = STORES[name], CertificateFiles(tmp_path)
    authority, own = files.renew(days=-1)
    async with AsyncExitStack() as stack:
        if says_why:
            port = stack.enter_context(TlsListener(store.protocol, own, demands=authority.certificate)).port
        else:
            proxy = await stack.enter_async_context(TlsProxy(shared(store.server).port, store.protocol))
            proxy.show(own, authority.certificate)
            port = proxy.port
        config = write_kubeconfigs(tmp_path, port, files)
        url = store.url.format(at=f"127.0.0.1:{port}", **files.names, **config)
        parsed = Url.parse(f"{url}&timeout={20.0 if says_why else stretched(0.5)}")
        backend = load(parsed).open(parsed)
        try:
            # A reason is not always read: sending may fail before that.
            with pytest.raises((ConfigError, Unavailable) if says_why else Unavailable) as raised:
                await (backend.leases.inspect("name") if hasattr(backend, "leases") else backend.broker.stats("name"))
        finally:
            await backend.close()
    where = r"of the context 'here' .*" if "kubernetes" in name else re.escape(str(files.names["cert"]))
    assert re.search(rf"the client's certificate {where} has expired \(20.* UTC\).*; renew it: ", str(raised.value))
    assert "check hosts" not in str(raised.value)


async def test_a_certificate_that_is_refused_on_an_open_connection_is_read_again(tmp_path: Path) -> None:
    """Kubernetes looks at the date of a client's certificate at each request."""
    files = CertificateFiles(tmp_path)
    async with HttpGate(shared(Kubernetes).port) as gate, TlsProxy(gate.port, "tls") as proxy:

        def first_certificate_is_over() -> None:
            gate.refusal = lambda line: None if proxy.accepted else (401, "Unauthorized")

        authority, own = files.renew()
        proxy.show(own, authority.certificate)
        config = write_kubeconfigs(tmp_path, proxy.port, files)["config"]
        parsed = Url.parse(f"kubernetes://default?kubeconfig={config}")
        backend = load(parsed).open(parsed)
        try:
            held = Held(backend, f"held-{uuid4().hex[:8]}")
            await held.take()
            first_certificate_is_over()
            authority, own = files.renew()
            proxy.show(own, authority.certificate)
            await held.use()
            assert proxy.accepted
        finally:
            await backend.close()


def test_an_api_server_that_refuses_a_certificate_which_has_expired() -> None:
    """It says no more than 401."""
    own = OwnCertificate("of the kubeconfig", 1_700_000_000.0)
    where = kubernetes.Where("https://a", "the kubeconfig", "b", 5.0, set(), own=own)
    refused = kubernetes.Answer(401, {"message": "Unauthorized"})
    assert str(kubernetes.translate(refused, kubernetes.Request("get", "a"), where)) == (
        "the API server https://a refused the login: the client's certificate of the kubeconfig has expired "
        "(2023-11-14 22:13 UTC); renew it"
    )


# --- a fleet -----------------------------------------------------------------------------------------------------


def untrusted(*members: Any) -> dict[int, TenureError]:
    """Return what these members say of the TLS of others."""
    found = dict[int, TenureError]()
    for one in members:
        if (transport := one._connection.opened.member._transport) is not None:  # it has begun
            unreached = transport.counts.unreached.items()
            found |= {number: error for number, error in unreached if "TLS" in str(error)}
    return found


async def renew_a_fleet(files: CertificateFiles) -> None:
    """Restart one member of three when the certificates of all have been replaced; fail unless it finds the leader."""
    usage = "serverAuth,clientAuth"
    files.renew(usage)
    members = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    options = "&".join(f"tls_{name}={path}" for name, path in files.names.items())
    urls = [f"peers://{','.join(members)}?me={me}&ttl_max=15&heartbeat=1&{options}&quorum=majority" for me in members]
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(tenure.connect(url)) for url in urls[:2]]
        until_renewed = await stack.enter_async_context(AsyncExitStack())
        third = await until_renewed.enter_async_context(tenure.connect(urls[2]))
        await asyncio.gather(*(member.leaders() for member in (first, second, third)))
        async with first.election("chair").campaign() as term:
            files.renew(usage)
            await until_renewed.aclose()
            again = await stack.enter_async_context(tenure.connect(urls[2]))

            async def finds_the_leader() -> bool:
                with suppress(Unavailable):  # as long as the others haven't dialled it
                    leader = await again.election("chair").leader()
                    return leader is not None and leader.token == term.token
                return False

            await until(lambda: untrusted(first, second, again) or finds_the_leader())
            assert not untrusted(first, second, again)
            term.check()


async def test_members_of_a_fleet_accept_and_show_new_certificates(tmp_path: Path) -> None:
    await renew_a_fleet(CertificateFiles(tmp_path))


@pytest.mark.parametrize("side", [ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH])
async def test_a_planted_member_that_reads_its_files_once_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: ssl.Purpose
) -> None:
    is_frozen = ssl.PROTOCOL_TLS_SERVER if side is ssl.Purpose.CLIENT_AUTH else ssl.PROTOCOL_TLS_CLIENT
    latest = ReloadingContext.latest

    def read_once(context: ReloadingContext) -> ssl.SSLContext:
        return context._settings.context if context.protocol == is_frozen else latest(context)

    monkeypatch.setattr(ReloadingContext, "latest", read_once)
    with pytest.raises(AssertionError, match="the TLS handshake with"):
        await renew_a_fleet(CertificateFiles(tmp_path))
