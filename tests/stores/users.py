"""The users of servers, which come and go, and get other passwords."""

from __future__ import annotations

import asyncio
from typing import Any

from redis import asyncio as aioredis

import tenure
from tenure._backends import postgres
from tests.docs.pages import commands
from tests.servers import Azurite, Etcd, Kubernetes, Nats, Postgres, RabbitMQ, Redis, ZooKeeper
from tests.servers.rabbitmq import US
from tests.servers.servicebus import ServiceBus
from tests.stores.postgres.migrated import native

PASSWORDS = {"first": "hush1firstly", "second": "hush2second"}
"""That of the first could be a key: it is base64."""


class Logins:
    """A server whose users come and go."""

    user: str = "first"
    """That of a login; empty if the server knows none."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.users: set[str] = set()

    async def prepare(self) -> None:
        """Make what users share, once."""

    async def add(self, user: str) -> None:
        await self.make(user)
        self.users.add(user)

    async def remove(self, user: str) -> None:
        await self.end(user)
        self.users.discard(user)

    async def make(self, user: str) -> None:
        raise NotImplementedError

    async def end(self, user: str) -> None:
        raise NotImplementedError

    async def replace(self, user: str, password: str) -> None:
        """Give the user another password, and end the connections that were made with the one of before."""
        raise NotImplementedError


class OfPostgres(Logins):
    """Roles with the rights of the page. A session of a role that is gone goes on, until its next request."""

    async def prepare(self) -> None:
        await postgres.migrate(self.server.url)

    async def make(self, user: str) -> None:
        grants = commands("docs/postgresql.md", "Rights", "GRANT USAGE ON SCHEMA tenure TO worker")
        await self._order(f"CREATE ROLE {user} LOGIN PASSWORD '{PASSWORDS[user]}'; {grants.replace('worker', user)}")

    async def end(self, user: str) -> None:
        await self._order(f"DROP OWNED BY {user}; DROP ROLE {user}")

    async def replace(self, user: str, password: str) -> None:
        await self._order(
            f"ALTER ROLE {user} PASSWORD '{password}'; "
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{user}'"
        )

    async def _order(self, statements: str) -> None:
        async with native(self.server.url) as connection:
            await connection.execute(statements)


class OfRedis(Logins):
    """Users with the rights of the page. Redis closes the connections of one that is gone."""

    async def make(self, user: str) -> None:
        line = commands("docs/redis.md", "Rights", "ACL SETUSER tenure")
        await self._order(line.replace("SETUSER tenure", f"SETUSER {user}").replace(">password", f">{PASSWORDS[user]}"))

    async def end(self, user: str) -> None:
        await self._order(f"ACL DELUSER {user}")

    async def replace(self, user: str, password: str) -> None:
        await self._order(f"ACL SETUSER {user} resetpass >{password}")
        await self._order(f"CLIENT KILL USER {user}")

    async def _order(self, line: str) -> None:
        async with aioredis.Redis.from_url(self.server.url) as client:
            await client.execute_command(*line.split())  # type: ignore[no-untyped-call]


class OfNats(Logins):
    """Users of one account, in a configuration that is read again. NATS closes the connections of one that is gone."""

    async def make(self, user: str) -> None:
        self.server.users[user] = PASSWORDS[user], {}
        await asyncio.to_thread(self.server.reconfigure)

    async def end(self, user: str) -> None:
        del self.server.users[user]
        await asyncio.to_thread(self.server.reconfigure)

    async def replace(self, user: str, password: str) -> None:
        self.server.users[user] = password, {}
        await asyncio.to_thread(self.server.reconfigure)


class OfRabbitMQ(Logins):
    """Users with all rights. RabbitMQ closes the connections of one that is gone."""

    async def make(self, user: str) -> None:
        made = f'rabbit_auth_backend_internal:add_user(<<"{user}">>, <<"{PASSWORDS[user]}">>, {US})'
        await asyncio.to_thread(self.server.order, made)
        await asyncio.to_thread(self.server.permit, user)

    async def end(self, user: str) -> None:
        await asyncio.to_thread(self.server.order, f'rabbit_auth_backend_internal:delete_user(<<"{user}">>, {US})')

    async def replace(self, user: str, password: str) -> None:
        changed = f'rabbit_auth_backend_internal:change_password(<<"{user}">>, <<"{password}">>, {US})'
        await asyncio.to_thread(self.server.order, changed)
        await asyncio.to_thread(self.server.close_connections, "the password was changed")


class OfEtcd(Logins):
    """Users with the role of the page. The token of one that is gone ends; those of others, at each change of users."""

    async def prepare(self) -> None:
        await asyncio.to_thread(self.server.require_login, "r00t")
        await asyncio.to_thread(self.server.add_user, "model", "hush3model", "tenure/")

    async def make(self, user: str) -> None:
        await self._order("user/add", {"name": user, "password": PASSWORDS[user]})
        await self._order("user/grant", {"user": user, "role": "model"})

    async def end(self, user: str) -> None:
        await self._order("user/delete", {"name": user})

    async def replace(self, user: str, password: str) -> None:
        await self._order("user/changepw", {"name": user, "password": password})

    async def _order(self, what: str, body: dict[str, str]) -> None:
        def order() -> None:
            self.server.call(f"auth/{what}", body, token=self.server.login())

        await asyncio.to_thread(order)


class OfZooKeeper(Logins):
    """The one user that a server is told of as it starts. It keeps its sessions over a restart."""

    async def replace(self, user: str, password: str) -> None:
        self.server.accept(user, password)
        await asyncio.to_thread(self.server.stop)
        await asyncio.to_thread(self.server.start)


class OfServiceBus(Logins):
    """A policy of a namespace, which replaces its key."""

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        server.control("keys", f"first={PASSWORDS['first']}")

    async def replace(self, user: str, password: str) -> None:
        await asyncio.to_thread(self.server.control, "keys", f"{user}={password}")


class OfKubernetes(Logins):
    """Users with one token each."""

    async def replace(self, user: str, password: str) -> None:
        await asyncio.to_thread(self.server.set, tokens={password: user})


class OfAzure(Logins):
    """The one account, with its key. A signature by the key of before ends, too."""

    user = ""

    async def make(self, user: str) -> None:
        await self.replace(user, PASSWORDS[user])

    async def end(self, user: str) -> None:
        """The account stays."""

    async def replace(self, user: str, password: str) -> None:
        await asyncio.to_thread(self.server.accept, password)


KINDS: dict[str, tuple[Any, dict[str, Any], type[Logins]]] = {
    "etcd": (Etcd, {}, OfEtcd),
    "nats": (Nats, {"password": "r00t"}, OfNats),
    "postgresql": (Postgres, {"password": "r00t"}, OfPostgres),
    "rabbitmq": (RabbitMQ, {}, OfRabbitMQ),
    "redis": (Redis, {"password": "r00t"}, OfRedis),
}
"""Servers to which users can be added while they run."""

OF_ONE_USER: dict[str, tuple[Any, dict[str, Any], type[Logins]]] = {
    "azure": (Azurite, {"key": PASSWORDS["first"]}, OfAzure),
    "kubernetes": (Kubernetes, {"tokens": {PASSWORDS["first"]: "first"}}, OfKubernetes),
    "servicebus": (ServiceBus, {}, OfServiceBus),
    "zookeeper": (ZooKeeper, {"login": ("first", PASSWORDS["first"]), "needs_login": True}, OfZooKeeper),
}
"""Servers that begin with the first user, and get no other."""


class Passwords:
    """Has the newest password, as a vault does."""

    def __init__(self, logins: Any) -> None:
        self.known = [PASSWORDS["first"]]
        self.asked = 0
        self._logins = logins

    async def credentials(self) -> tenure.Credentials:
        self.asked += 1
        return tenure.Credentials(self.known[-1], user=self._logins.user)

    async def replace(self, number: int) -> None:
        """Replace the password: by turns first on the server, and first here."""
        new = f"hush{number:04}next"
        if number % 2:
            self.known.append(new)
            await self._logins.replace("first", new)
        else:
            await self._logins.replace("first", new)
            self.known.append(new)
