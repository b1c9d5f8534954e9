"""The stores that foreign clients share with us, and the contestants that each of them knows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

from kazoo.client import KazooClient

from tests.absent import skip_or_fail
from tests.interop.acts import Record
from tests.interop.contestants import Contestant, Etcdctl, client_go, curator, kazoo, python_kubernetes
from tests.interop.stored import in_etcd, in_kubernetes, in_zookeeper
from tests.servers import shared
from tests.servers.etcd import Etcd, end_of, in_base64
from tests.servers.kubernetes import TOKEN_ENV, KubeApiserver, Kubernetes, apis, lease_path
from tests.servers.zookeeper import ZooKeeper

LONG = 15.0
"""Seconds of leases and sessions where nothing waits for their end: none is lost on a machine that is busy."""
SHORT = 2.0
"""The same where a test waits for their end."""
SLOW = {"etcdctl elect": 60.0}
"""Clients whose sessions can't be that short, and how long they last."""


class Store(Protocol):
    """A server that runs, and the contestants that may stand on it."""

    clients: ClassVar[dict[str, str]]
    """The foreign clients, and the option with which we stand beside each of them."""
    anonymous: ClassVar[frozenset[str]] = frozenset()
    """Those of them that write no identity, and show none."""
    session: ClassVar[float]
    """Seconds of their leases and sessions, if nothing waits for the end."""
    is_queued: ClassVar[bool]
    """Whether candidates stand in a queue in the store."""

    def url(self, option: str) -> str:
        """Return the URL under which we stand beside a foreign client with that *option*."""
        ...

    def foreign(self, client: str, session: float, contestant: str, record: Record) -> Contestant: ...

    def places(self, name: str) -> int:
        """Return how many stand in the queue for *name*, the leader included, if candidates stand in a queue."""
        ...

    def stored(self, name: str, known: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return what is stored for an election, whose *name* is as the store has it; *known* gives forms of ids."""
        ...

    def close(self) -> None: ...


class EtcdStore:
    """An etcd, under the prefix that is our default."""

    PREFIX = "tenure/"
    clients: ClassVar = {"etcdctl elect": "", "etcdctl lock": "kind=lock"}
    anonymous: ClassVar = frozenset({"etcdctl lock"})
    session: ClassVar = LONG
    is_queued: ClassVar = True

    def __init__(self) -> None:
        self.server = shared(Etcd)

    def url(self, option: str) -> str:
        return f"{self.server.url}?{option}".rstrip("?")

    def foreign(self, client: str, session: float, contestant: str, record: Record) -> Contestant:
        if not shutil.which("etcdctl"):
            skip_or_fail("etcdctl is not installed (apt-get install etcd-client)")
        return Etcdctl(self.server.address, self.PREFIX, client.split()[1], int(session), contestant, record)

    def places(self, name: str) -> int:
        prefix = f"{self.PREFIX}{name}/"
        asked = {"key": in_base64(prefix), "range_end": in_base64(end_of(prefix)), "count_only": True}
        return int(self.server.call("kv/range", asked).get("count", 0))

    def stored(self, name: str, known: Mapping[str, str]) -> list[dict[str, Any]]:
        shown = known.get(name, name)
        return [one for one in in_etcd(self.server, self.PREFIX, known) if shown in one["key"].split("/")]

    def close(self) -> None:
        pass


class ZooKeeperStore:
    """A ZooKeeper, under a chroot."""

    PREFIX = "/interop"
    RECIPES: ClassVar = {
        "Curator LeaderLatch": (curator, "latch"),
        "Curator LeaderSelector": (curator, "selector"),
        "Curator InterProcessMutex": (curator, "mutex"),
        "kazoo Lock": (kazoo, "lock"),
        "kazoo Election": (kazoo, "election"),
    }
    clients: ClassVar = {
        "Curator LeaderLatch": "dialect=latch",
        "Curator LeaderSelector": "dialect=lock",
        "Curator InterProcessMutex": "dialect=lock",
        "kazoo Lock": "dialect=kazoo",
        "kazoo Election": "dialect=kazoo",
    }
    anonymous: ClassVar = frozenset({"Curator InterProcessMutex"})
    session: ClassVar = LONG
    is_queued: ClassVar = True

    def __init__(self) -> None:
        self.server = shared(ZooKeeper)
        self.hosts = f"127.0.0.1:{self.server.port}"
        self.client = KazooClient(self.hosts)
        self.client.start()

    def url(self, option: str) -> str:
        return f"{self.server.url.replace('/?', f'{self.PREFIX}?')}&{option}"

    def foreign(self, client: str, session: float, contestant: str, record: Record) -> Contestant:
        start, recipe = self.RECIPES[client]
        return start(self.hosts, self.PREFIX, recipe, session, contestant, record)

    def places(self, name: str) -> int:
        path = f"{self.PREFIX}/{name}"
        return len(self.client.get_children(path)) if self.client.exists(path) else 0

    def stored(self, name: str, known: Mapping[str, str]) -> list[dict[str, Any]]:
        return in_zookeeper(self.client, f"{self.PREFIX}/{name}", known)

    def close(self) -> None:
        self.client.stop()
        self.client.close()


class KubernetesStore:
    """A namespace of an API server: the double, or a real one where its program is named."""

    NAMESPACE = "default"
    clients: ClassVar = {"client-go": "", "Python client": ""}
    anonymous: ClassVar = frozenset[str]()
    session: ClassVar = 3.0  # the Python client never releases its lease, and client-go asks 7 times as often
    is_queued: ClassVar = False

    def __init__(self) -> None:
        self.server: Kubernetes | KubeApiserver = shared(apis()[-1])
        if isinstance(self.server, KubeApiserver):  # the contestants inherit these
            os.environ[TOKEN_ENV] = os.environ["INTEROP_TOKEN"] = self.server.token
            os.environ["INTEROP_CA"] = str(self.server.authority.certificate)

    def url(self, option: str) -> str:
        return self.server.url

    def foreign(self, client: str, session: float, contestant: str, record: Record) -> Contestant:
        if client == "Python client" and find_spec("kubernetes") is None:
            skip_or_fail("the Python client of Kubernetes is not installed (pip install kubernetes)")
        start = client_go if client == "client-go" else python_kubernetes
        return start(self.server.server, self.NAMESPACE, int(session), contestant, record)

    def places(self, name: str) -> int:
        raise NotImplementedError("there is no queue")

    def stored(self, name: str, known: Mapping[str, str]) -> list[dict[str, Any]]:
        status, lease = self.server.ask("GET", lease_path(name, self.NAMESPACE))
        assert status == 200, lease
        return [in_kubernetes(lease, known)]

    def close(self) -> None:
        pass


STORES: tuple[type[Store], ...] = (EtcdStore, ZooKeeperStore, KubernetesStore)
PAIRS = [(store, client) for store in STORES for client in store.clients]
"""Each foreign client with its store."""


def slug(client: str) -> str:
    """Return the name of a client as a part of an election's name, which every store takes."""
    return client.lower().replace(" ", "-").replace("_", "-")
