"""Redis Sentinel: each new connection is made to the server that the sentinels name as primary at that time.

The request to the sentinels is ``SENTINEL GET-MASTER-ADDR-BY-NAME``, as their guide for clients recommends; if one is
silent, the next one gets it, too. redis-py's own ``Sentinel`` queries one after the other, so that a silent one uses up
the time of a request, and doesn't distinguish an unknown service from unreachable sentinels.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from redis import asyncio as aioredis
from redis import exceptions

from tenure._backends.redis.address import Address, Endpoint, Options, database_of, login_of
from tenure._backends.redis.client import Client, target_of, translate
from tenure._backends.redis.connections import (
    LoopConnections,
    PlainConnection,
    TlsConnection,
    connected,
    first_answer,
)
from tenure._logins import Logins, Source
from tenure._redaction import redacted, redacting
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

PORT = 26_379


@dataclass(frozen=True, slots=True)
class SentinelOptions(Options):
    """The query of a ``redis+sentinel:`` or ``rediss+sentinel:`` URL.

    Args:
        sentinel_user: The user at the sentinels, if they require one.
        sentinel_password: The password there. The one before the ``@`` is for the primary.
        sentinel_tls: Whether the sentinels use TLS; by default, as the primary.
    """

    sentinel_user: str | None = None
    sentinel_password: Secret | None = None
    sentinel_tls: bool | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """A service that sentinels monitor, and their addresses."""

    name: str
    sentinels: tuple[Endpoint, ...]
    at_sentinels: Address
    """The login at the sentinels; host and port are replaced by those of each."""

    def __str__(self) -> str:
        places = ",".join(f"{host}:{port}" for host, port in self.sentinels)
        return f"{places}/{self.name}"


@dataclass(frozen=True, slots=True)
class PrimaryAddress(Address):
    """The login at the primary of a service; host and port come from its sentinels."""

    service: Service

    @property
    def uses_tls(self) -> bool:
        """Whether the primary or its sentinels are asked by TLS."""
        return self.is_tls or self.service.at_sentinels.is_tls

    def __str__(self) -> str:
        scheme = "rediss+sentinel" if self.is_tls else "redis+sentinel"
        named = f"{scheme}://{self.service}"
        return f"{named}?db={self.database}" if self.database else named


def primary_of(url: Url, options: SentinelOptions) -> PrimaryAddress:
    """Return the service that *url* names.

    Raises:
        ConfigError: It has another form.
    """
    form = f"write {url.scheme}://[[user]:password@]host[:port][,host[:port]…]/SERVICE"
    places = url.places(PORT, form)
    service = unquote(url.path.strip("/"))
    if not service or "/" in service:
        raise ConfigError(f"{str(url)!r} names no service; {form}, with the name after 'sentinel monitor'")
    host, port = places[0]
    database, (user, password) = database_of(url, options, {}), login_of(url, options)
    is_tls = url.scheme.startswith("rediss")
    are_sentinels_tls = is_tls if options.sentinel_tls is None else options.sentinel_tls
    at_sentinels = Address(host, port, 0, options.sentinel_user, options.sentinel_password, are_sentinels_tls)
    return PrimaryAddress(host, port, database, user, password, is_tls, Service(service, places, at_sentinels))


class SentinelClient(Client):
    """All connections to the primary of one service, by event loop."""

    address: PrimaryAddress

    def __init__(self, address: PrimaryAddress, options: SentinelOptions, credentials: Source | None = None) -> None:
        super().__init__(address, options, credentials)
        if options.cluster:
            raise ConfigError("a Redis Cluster has no sentinels; remove cluster=true, or write redis:// without them")

    def _new_connections(self) -> LoopConnections:
        return LoopConnections(self.address, self.options, self.tls, self.logins, self._connected)

    def _connected(
        self, address: Address, options: Options, tls: ssl.SSLContext | None, logins: Logins
    ) -> aioredis.Redis:
        kind = TlsPrimaryConnection if address.is_tls else PrimaryConnection
        return connected(address, options, tls, logins, kind, find=self.find_primary)

    def translated(self, error: Exception) -> TenureError:
        """Turn an error of redis-py into one of ours; an error about the sentinels is its cause already."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, TenureError):
                return Unavailable(str(cause)) if self._worked else cause
            cause = cause.__cause__
        return super().translated(error)

    async def hosts(self) -> list[str]:
        """Return the host of the primary, as the sentinels name it now."""
        host, _ = await self._bounded(lambda limit: self.find_primary(), None)
        return [host]

    async def find_primary(self) -> Endpoint:
        """Return the primary, as the first sentinel names it that knows the service.

        Raises:
            Unavailable: None of them answers.
            ConfigError: They don't know the service, refuse the login, or are no sentinels.
        """
        service = self.address.service
        unknown: list[Endpoint] = []

        async def query(place: Endpoint) -> Endpoint:
            address = replace(service.at_sentinels, host=place[0], port=place[1])
            sentinel = connected(address, self.options, self.tls, Logins(address.username, address.password))
            try:
                answer = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service.name)  # type: ignore[no-untyped-call]
            finally:
                await sentinel.aclose()
            if answer is None:
                unknown.append(place)
                raise exceptions.ConnectionError("it does not know the service")
            host, port = answer
            return (host.decode() if isinstance(host, bytes) else host), int(port)

        try:
            _, primary = await first_answer(service.sentinels, query)
        except exceptions.RedisError as error:
            raise self._not_found(error, unknown) from error
        return primary

    @redacting
    def _not_found(self, error: exceptions.RedisError, unknown: list[Endpoint]) -> TenureError:
        service, said = self.address.service, redacted(str(error))
        if unknown:
            places = ", ".join(f"{host}:{port}" for host, port in unknown)
            return ConfigError(
                f"the sentinel at {places} knows no service {service.name!r}; write the name after 'sentinel monitor' "
                "in its configuration"
            )
        target = target_of(
            error,
            f"redis+sentinel://{service}",
            worked=False,
            own=self.own if service.at_sentinels.is_tls else None,
            plain="set sentinel_tls=false if the sentinels don't use TLS",
        )
        target = replace(target, store=f"every sentinel of {service}", software="a sentinel")
        match error:
            case exceptions.AuthenticationError():
                return target.login_refused(said, "check the options sentinel_user and sentinel_password")
            case exceptions.NoPermissionError():
                return target.not_permitted(said, "grant it +sentinel")
            case exceptions.ConnectionError() | exceptions.TimeoutError() if failed := target.failure(error):
                return failed
            case exceptions.ConnectionError() | exceptions.TimeoutError():
                uses = "uses" if service.at_sentinels.is_tls else "does not use"
                return target.closed(said, f"; check whether they use TLS (the client {uses} it)")
            case exceptions.ResponseError() if "unknown command" in str(error).lower():
                return ConfigError(
                    f"{service} names a server that is no sentinel; the usual port of sentinels is {PORT}"
                )
        return translate(error, str(service))


class _Redirected:
    """A connection to the server that *find* returns each time it is opened."""

    def __init__(self, *, find: Any, **more: Any) -> None:
        self._find = find
        super().__init__(**more)

    async def _connect(self) -> None:
        self.host, self.port = await self._find()
        await super()._connect()  # type: ignore[misc]


class PrimaryConnection(_Redirected, PlainConnection):
    """A connection to the primary, without TLS."""


class TlsPrimaryConnection(_Redirected, TlsConnection):
    """A connection to the primary, with TLS; the certificate must be for the host that the sentinels name."""
