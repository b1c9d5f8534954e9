"""Candidates of ``python -m benchmarks coordinators``, each a process: tenure, other libraries, loops written by hand.

``python -m benchmarks.candidates KIND ADDRESS NAME TTL`` prints ``standing TIME`` before it campaigns, and ``elected
TIME`` when it begins to lead. A line on its input makes it print ``resigning TIME``, resign, and campaign again. Times
are of the clock that all processes share.

The loops written by hand are the simplest that are safe while nothing stalls: they stop leading when their lease, or
session, may have ended. They have no token, no hint of a vacancy where that takes more than a line, and one name each.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

RETRY = 2 / 15
"""The share of its lease after which a candidate that polls asks again: client-go's defaults."""
DEADLINE = 10 / 15
"""The share of its lease within which client-go's leader must have renewed it."""
AGAIN = 0.3
"""Seconds until a loop campaigns again after it has resigned, so that another may lead."""


class Leading:
    """What a leader does: nothing, until it is told to resign."""

    def __init__(self) -> None:
        self._resign = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while sys.stdin.readline():
            self._resign.set()
        os._exit(0)  # the benchmark has ended

    @staticmethod
    def standing() -> None:
        """Note that it begins to campaign: all is imported, and the store connected where that is explicit."""
        print("standing", time.monotonic(), flush=True)

    def wait(self) -> None:
        """Lead until it is told to resign."""
        print("elected", time.monotonic(), flush=True)
        self._resign.wait()
        self._resign.clear()
        print("resigning", time.monotonic(), flush=True)

    async def work(self, *_: object) -> None:
        """Lead until it is told to resign."""
        await asyncio.to_thread(self.wait)


async def tenure(address: str, name: str, ttl: float, leading: Leading) -> None:
    import tenure

    async with tenure.connect(address) as backend:
        election = backend.election(name, ttl=ttl)
        leading.standing()
        await election.run(leading.work, again=True)


async def while_kept(leading: Leading, keep: Callable[[], Awaitable[bool]], every: float, deadline: float) -> None:
    """Lead while *keep* says yes, asked so often; not longer than *deadline* after the last yes was asked for."""
    work = asyncio.create_task(leading.work())
    asked_at = time.monotonic()
    while not work.done() and (left := asked_at + deadline - time.monotonic()) > 0:
        await asyncio.wait({work}, timeout=min(every, left))
        now = time.monotonic()
        with suppress(Exception):
            if not await asyncio.wait_for(keep(), every):
                break
            asked_at = now
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work


# --- etcd --------------------------------------------------------------------------------------------------------


async def etcd_by_hand(address: str, name: str, ttl: float, leading: Leading) -> None:
    """A key with a lease, created in a transaction, by aiohttp over the JSON gateway."""
    import aiohttp

    key = base64.b64encode(name.encode()).decode()

    async with aiohttp.ClientSession(f"http://{address}", timeout=aiohttp.ClientTimeout(ttl / 3)) as session:

        async def ask(path: str, **body: object) -> dict[str, Any]:
            async with session.post(f"/v3/{path}", json=body) as answer:
                found: dict[str, Any] = await answer.json()
                return found

        leading.standing()
        while True:
            while (await ask("kv/range", key=key, count_only=True)).get("count"):
                await asyncio.sleep(ttl * RETRY)
            lease = (await ask("lease/grant", TTL=math.ceil(ttl)))["ID"]
            free = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
            put = {"request_put": {"key": key, "value": "", "lease": lease}}
            if (await ask("kv/txn", compare=[free], success=[put])).get("succeeded"):

                async def keep(lease: str = lease) -> bool:
                    answer = await ask("lease/keepalive", ID=lease)
                    return int(answer["result"].get("TTL", 0)) > 0

                await while_kept(leading, keep, ttl / 3, ttl)
            await ask("lease/revoke", ID=lease)
            await asyncio.sleep(AGAIN)


# --- ZooKeeper ---------------------------------------------------------------------------------------------------


def zookeeper_by_hand(address: str, name: str, ttl: float, leading: Leading) -> None:
    """An ephemeral node, by kazoo; each candidate watches it."""
    from kazoo.client import KazooClient
    from kazoo.exceptions import NodeExistsError

    client = KazooClient(address, timeout=ttl)
    client.start()
    path = f"/by-hand/{name}"
    client.ensure_path("/by-hand")
    leading.standing()
    while True:
        gone = threading.Event()
        with suppress(NodeExistsError):
            client.create(path, b"", ephemeral=True)
            leading.wait()  # kazoo tells of a lost session only after it is connected again
            client.delete(path)
            time.sleep(AGAIN)
        if client.exists(path, watch=lambda event, gone=gone: gone.set()):
            gone.wait()


def kazoo_election(address: str, name: str, ttl: float, leading: Leading) -> None:
    from kazoo.client import KazooClient

    client = KazooClient(address, timeout=ttl)
    client.start()
    election = client.Election(f"/kazoo/{name}", "bench")
    leading.standing()
    while True:
        election.run(leading.wait)


def kazoo_lock(address: str, name: str, ttl: float, leading: Leading) -> None:
    from kazoo.client import KazooClient

    client = KazooClient(address, timeout=ttl)
    client.start()
    lock = client.Lock(f"/kazoo/{name}", "bench")
    leading.standing()
    while True:
        with lock:
            leading.wait()


# --- Kubernetes --------------------------------------------------------------------------------------------------


async def client_go(address: str, name: str, ttl: float, leading: Leading) -> None:
    """A Lease as client-go keeps it, by aiohttp: changes observed; its 15, 10 and 2 s as shares of the lease."""
    import aiohttp

    me, leases = uuid.uuid4().hex, "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    seen, seen_at = "", 0.0
    mine: dict[str, Any] | None = None  # as it was last written here: it is replaced without being read

    def record(transitions: int, holder: str = me) -> dict[str, object]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        seconds = math.ceil(ttl) if holder else 1
        times = {"acquireTime": now, "renewTime": now}
        return {"holderIdentity": holder, "leaseDurationSeconds": seconds, "leaseTransitions": transitions} | times

    async with aiohttp.ClientSession(f"http://{address}", timeout=aiohttp.ClientTimeout(ttl / 3)) as session:

        async def put(lease: dict[str, Any], spec: dict[str, object]) -> bool:
            nonlocal mine
            async with session.put(f"{leases}/{name}", json=lease | {"spec": spec}) as answer:
                mine = await answer.json() if answer.status == 200 and spec["holderIdentity"] else None
                return answer.status == 200

        async def try_to_lead(holder: str = me) -> bool:
            nonlocal seen, seen_at
            if mine and await put(mine, record(mine["spec"]["leaseTransitions"], holder)):
                return True
            async with session.get(f"{leases}/{name}") as answer:
                lease = await answer.json()
                if answer.status == 404:
                    body = {"metadata": {"name": name}, "spec": record(0)}
                    async with session.post(leases, json=body) as created:
                        return created.status == 201
            version, spec = lease["metadata"]["resourceVersion"], lease["spec"]
            if version != seen:
                seen, seen_at = version, time.monotonic()
            other = spec.get("holderIdentity")
            if other not in ("", None, me) and time.monotonic() < seen_at + spec["leaseDurationSeconds"]:
                return False
            return await put(lease, record(spec.get("leaseTransitions", 0) + (other != me), holder))

        leading.standing()
        while True:
            while not await try_to_lead():
                await asyncio.sleep(ttl * RETRY * random.uniform(1.0, 2.2))
            await while_kept(leading, try_to_lead, ttl * RETRY, ttl * DEADLINE)
            await try_to_lead(holder="")
            await asyncio.sleep(ttl * RETRY * 2.2 + AGAIN)


async def grelmicro_kubernetes(address: str, name: str, ttl: float, leading: Leading) -> None:
    import tempfile

    from grelmicro.sync.kubernetes import KubernetesSyncBackend

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        cluster = (
            f"clusters: [{{name: c, cluster: {{server: 'http://{address}'}}}}]\nusers: [{{name: u, user: {{}}}}]\n"
        )
        contexts = "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
        file.write(f"apiVersion: v1\nkind: Config\n{cluster}{contexts}")
        file.flush()
        async with KubernetesSyncBackend("default", kubeconfig=file.name) as backend:
            await grelmicro(backend, name, ttl, leading)


async def grelmicro_redis(address: str, name: str, ttl: float, leading: Leading) -> None:
    from grelmicro.sync.redis import RedisSyncBackend

    async with RedisSyncBackend(f"redis://{address}") as backend:
        await grelmicro(backend, name, ttl, leading)


async def grelmicro(backend: Any, name: str, ttl: float, leading: Leading) -> None:
    from grelmicro.sync.leaderelection import LeaderElection

    leading.standing()
    while True:
        times = {"lease_duration": ttl, "renew_deadline": ttl * DEADLINE, "retry_interval": ttl * RETRY}
        election = LeaderElection(name, backend=backend, backend_timeout=ttl / 3, **times)
        running = asyncio.create_task(election())
        await election.wait_for_leader()
        await leading.work()
        running.cancel()
        await asyncio.wait({running})
        await asyncio.sleep(ttl * RETRY + AGAIN)


def python_kubernetes(address: str, name: str, ttl: float, leading: Leading) -> None:
    """The leader election of the package ``kubernetes``, which can't resign; it accepts no period below a second."""
    from kubernetes import client
    from kubernetes.leaderelection import electionconfig, leaderelection
    from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

    client.Configuration.set_default(client.Configuration(host=f"http://{address}"))
    lock = LeaseLock(name, "default", uuid.uuid4().hex)
    times = [math.ceil(ttl), max(ttl * DEADLINE, 1.3), max(ttl * RETRY, 1.0)]
    config = electionconfig.Config(lock, *times, onstarted_leading=leading.wait, onstopped_leading=lambda: None)
    leading.standing()
    leaderelection.LeaderElection(config).run()


Kind = Callable[[str, str, float, Leading], Awaitable[None] | None]

KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        tenure,
        etcd_by_hand,
        zookeeper_by_hand,
        kazoo_election,
        kazoo_lock,
        client_go,
        grelmicro_kubernetes,
        grelmicro_redis,
        python_kubernetes,
    )
}


async def stand(kind: Kind, address: str, name: str, ttl: float) -> None:
    leading = Leading()
    if asyncio.iscoroutinefunction(kind):
        await kind(address, name, ttl, leading)
    else:
        await asyncio.to_thread(kind, address, name, ttl, leading)


if __name__ == "__main__":
    asyncio.run(stand(KINDS[sys.argv[1]], sys.argv[2], sys.argv[3], float(sys.argv[4])))
