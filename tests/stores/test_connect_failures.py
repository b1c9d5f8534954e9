"""Failures to connect, on every store: the same class of error and the same words, whatever its driver says."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

for _driver in ("aiohttp", "aiormq", "asyncpg", "azure.servicebus", "azure.storage.blob", "kazoo", "nats", "redis"):
    pytest.importorskip(_driver)

from tenure._connect_failures import Target
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
FIRST = 60.0
"""Seconds that nobody waits for: the failure is told at once."""


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
        parsed = Url.parse(STORES[name].format(at=at, timeout=stretched(0.5) if waits else FIRST))
        began = time.monotonic()
        with pytest.raises(TenureError) as caught:
            backend: Any = load(parsed).open(parsed)
            await (link_of(backend) if "links" in name else use(backend))
        assert waits or time.monotonic() - began < FIRST / 2
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


def test_every_store_is_tried() -> None:
    found = {module.rpartition(".")[2] for module, _ in BACKENDS.values()}
    assert found == {name.partition(",")[0] for name in STORES} | OTHERS
