"""Processes of ``python -m benchmarks hang`` that want to be the only one to act: tenure, and the other usual ways.

``python -m benchmarks.acting KIND ADDRESS NAME TTL FOLDER HOLDER RESOURCE`` prints ``ready`` when all is imported, and
connected. A line on its input tells it what to do: ``campaign``; ``hang``, and ``release`` it from that; ``freeze``,
which stops the process between its next check and the act that follows. It acts every 20 ms while it believes that it
leads: it appends its holder's name, the time and its token, if it has one, to a file in FOLDER, or to a table of
RESOURCE.

Each is written as its documentation shows it. The time limits of the clients are their defaults.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

EVERY = 0.02
"""Seconds between two acts."""


class Work:
    """The work of a leader: it acts, and does something else meanwhile, which may hang."""

    def __init__(self, folder: str, holder: str) -> None:
        self.holder = holder
        self.folder = Path(folder)
        self._log = os.open(self.folder / "acts", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._campaigns = threading.Event()
        self._released = threading.Event()
        self._released.set()
        self._freezes = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            match line.strip():
                case "campaign":
                    self._campaigns.set()
                case "hang":
                    self._released.clear()
                case "release":
                    self._released.set()
                case "freeze":
                    self._freezes.set()
        os._exit(0)  # the benchmark has ended

    def until_told(self) -> None:
        """Wait until this process is told to campaign: all is imported, and connected."""
        print("ready", flush=True)
        self._campaigns.wait()

    def act(self, token: int | None = None) -> None:
        """Act, right after the leader has checked that it leads."""
        self.between()
        self.note("acts", token)

    def between(self) -> None:
        """Do nothing between a check and the act; if it was told to, the process is stopped here."""
        if self._freezes.is_set():
            self._freezes.clear()
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no step further

    def note(self, what: str, token: int | None = None) -> None:
        """Append a line to the log: one write, so the lines of all processes have one order."""
        os.write(self._log, f"{self.holder} {what} {time.monotonic():.6f} {'-' if token is None else token}\n".encode())

    def may_hang(self) -> None:
        """Wait as long as the call hangs that this stands for."""
        self._released.wait()

    def rest(self) -> None:
        """Do something else until the next act."""
        time.sleep(EVERY)
        self.may_hang()


# --- tenure ------------------------------------------------------------------------------------------------------


async def tenure(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    import tenure

    async def lead(term: tenure.Term) -> None:
        while True:
            term.check()
            work.act(term.token)
            await asyncio.sleep(EVERY)
            work.may_hang()

    async with tenure.connect(address) as backend:
        election = backend.election(name, ttl=ttl)
        await election.leader()  # so that all is imported
        await asyncio.to_thread(work.until_told)
        await election.run(lead)


async def tenure_fenced(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    """Acts are rows of a table, inserted in one statement with the fence."""
    import asyncpg

    import tenure

    connection = await asyncpg.connect(resource)

    async def insert(token: int) -> None:
        row = f"INSERT INTO act VALUES (DEFAULT, '{name}', '{work.holder}', {time.monotonic()}, {token})"
        try:
            # One round trip, and one transaction: a process that is stopped meanwhile leaves none open.
            await connection.execute(f"SELECT tenure.fence('{name}', {token}); {row}")
        except asyncpg.PostgresError as refused:
            if refused.sqlstate != "TN001":
                raise
            work.note("refused", token)

    async def lead(term: tenure.Term) -> None:
        while True:
            term.check()
            work.between()
            await asyncio.shield(asyncio.create_task(insert(term.token)))  # it has been sent: its answer is counted
            await asyncio.sleep(EVERY)
            work.may_hang()

    async with tenure.connect(address) as backend:
        election = backend.election(name, ttl=ttl)
        await election.leader()  # so that all is imported
        await asyncio.to_thread(work.until_told)
        await election.run(lead)


def tenure_threads(
    address: str, name: str, ttl: float, work: Work, resource: str, stall_after: float | None = None
) -> None:
    import tenure

    def lead(term: tenure.sync.Term) -> None:
        while True:
            term.check()
            work.act(term.token)
            term.beat()
            work.rest()

    with tenure.sync.connect(address) as backend:
        election = backend.election(name, ttl=ttl, stall_after=stall_after)
        election.leader()
        work.until_told()
        election.run(lead)


def tenure_threads_beating(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    tenure_threads(address, name, ttl, work, resource, stall_after=ttl / 3)


# --- Redis -------------------------------------------------------------------------------------------------------


def redis_lock(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    import redis

    client = redis.Redis.from_url(address)
    client.ping()
    work.until_told()
    with client.lock(name, timeout=ttl):
        while True:
            work.act()
            work.rest()


def redis_lock_renewed(address: str, name: str, ttl: float, work: Work, resource: str, **limits: Any) -> None:
    """A thread renews the lock every third of its timeout; the work looks whether that has failed."""
    import redis

    client = redis.Redis.from_url(address, **limits)
    client.ping()
    lock = client.lock(name, timeout=ttl, thread_local=False)
    lost = threading.Event()

    def renew() -> None:
        while not lost.wait(ttl / 3):
            try:
                lock.reacquire()
            except redis.RedisError:
                lost.set()

    work.until_told()
    while True:
        with suppress(redis.RedisError):
            lock.acquire()
            lost.clear()
            threading.Thread(target=renew, daemon=True).start()
            while not lost.is_set():
                work.act()
                work.rest()
            lock.release()


def redis_lock_renewed_in_time(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    """The same; a request that gets no answer within a third of the timeout has failed, and is not repeated."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    limits = {"socket_timeout": ttl / 3, "socket_connect_timeout": ttl / 3, "retry": Retry(NoBackoff(), 0)}
    redis_lock_renewed(address, name, ttl, work, resource, **limits)


def python_redis_lock(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    import redis
    import redis_lock

    client = redis.Redis.from_url(address)
    client.ping()
    work.until_told()
    with redis_lock.Lock(client, name, expire=math.ceil(ttl), auto_renewal=True):
        while True:
            work.act()
            work.rest()


# --- ZooKeeper ---------------------------------------------------------------------------------------------------


def kazoo_election(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    from kazoo.client import KazooClient

    def lead() -> None:
        while True:
            work.act()
            work.rest()

    client = KazooClient(address, timeout=ttl)
    client.start()
    work.until_told()
    client.Election(f"/{name}", work.holder).run(lead)


def kazoo_election_listening(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    """With a listener for the state of the connection: SUSPENDED pauses the work, LOST ends it."""
    from kazoo.client import KazooClient, KazooState

    connected, lost = threading.Event(), threading.Event()

    def listen(state: str) -> None:
        if state == KazooState.CONNECTED:
            connected.set()
        else:
            connected.clear()
        if state == KazooState.LOST:
            lost.set()

    def lead() -> None:
        lost.clear()
        while not lost.is_set():
            if connected.is_set():
                work.act()
            work.rest()

    client = KazooClient(address, timeout=ttl)
    client.add_listener(listen)
    client.start()
    work.until_told()
    while True:
        client.Election(f"/{name}", work.holder).run(lead)


# --- others ------------------------------------------------------------------------------------------------------


def postgres_advisory_lock(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    """A lock of the session, which ends with the connection."""
    import psycopg

    with psycopg.connect(address, autocommit=True) as connection:
        work.until_told()
        connection.execute("SELECT pg_advisory_lock(hashtext(%s))", [name])
        while True:
            work.act()
            work.rest()


def flock(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    import fcntl

    work.until_told()
    with open(work.folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        while True:
            work.act()
            work.rest()


def nothing(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    """No lock at all, to see that the measurement finds two that act."""
    work.until_told()
    while True:
        work.act()
        work.rest()


def kubernetes_election(address: str, name: str, ttl: float, work: Work, resource: str) -> None:
    """The leader election of the package ``kubernetes``; the process ends when it has lost the lease, as is usual."""
    from kubernetes import client
    from kubernetes.leaderelection import electionconfig, leaderelection
    from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

    def lead() -> None:
        while True:
            work.act()
            work.rest()

    client.Configuration.set_default(client.Configuration(host=address))
    lock = LeaseLock(name, "default", uuid.uuid4().hex)
    times = [math.ceil(ttl), max(ttl * 2 / 3, 1.3), 1.0]  # it accepts no period below a second
    config = electionconfig.Config(lock, *times, onstarted_leading=lead, onstopped_leading=lambda: os._exit(1))
    work.until_told()
    leaderelection.LeaderElection(config).run()


Kind = Callable[[str, str, float, Work, str], Awaitable[None] | None]

KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        tenure,
        tenure_fenced,
        tenure_threads,
        tenure_threads_beating,
        redis_lock,
        redis_lock_renewed,
        redis_lock_renewed_in_time,
        python_redis_lock,
        kazoo_election,
        kazoo_election_listening,
        postgres_advisory_lock,
        flock,
        nothing,
        kubernetes_election,
    )
}


def main() -> None:
    kind, address, name, ttl, folder, holder, resource = sys.argv[1:]
    done: Any = KINDS[kind](address, name, float(ttl), Work(folder, holder), resource)
    if done is not None:
        asyncio.run(done)


if __name__ == "__main__":
    main()
