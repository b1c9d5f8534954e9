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

from tenure import _connect_failures
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


def test_every_store_is_tried() -> None:
    found = {module.rpartition(".")[2] for module, _ in BACKENDS.values()}
    assert found == {name.partition(",")[0] for name in STORES} | OTHERS
