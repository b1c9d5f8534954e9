"""Leases and queues in Redis 7 and later: ``redis://host:6379/0``, and ``rediss://`` for TLS.

``redis+sentinel://a:26379,b:26379/SERVICE`` is the primary that sentinels name, ``rediss+sentinel://`` over TLS;
``redis+unix:///PATH`` a server on this machine, by its Unix socket, which is also written ``unix:///PATH``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tenure._backends.redis.address import Address, Options, address_of
from tenure._backends.redis.client import Client
from tenure._backends.redis.cluster import ClusterClient
from tenure._backends.redis.diagnosis import diagnose
from tenure._backends.redis.leases import TRAITS, RedisLeases
from tenure._backends.redis.queue import QUEUE_TRAITS, RedisBroker
from tenure._backends.redis.sentinel import SentinelClient, SentinelOptions, primary_of
from tenure._backends.redis.wake import Wake
from tenure._logins import Source
from tenure._opened import Fact
from tenure._runtime.clock import Clock
from tenure._runtime.closing import close_in_order
from tenure._url import Url
from tenure.errors import ConfigError

__all__ = ["QUEUE_TRAITS", "TRAITS", "Options", "RedisBackend", "RedisBroker", "RedisLeases", "open"]


def open(url: Url, *, clock: Clock | None = None, credentials: Source | None = None) -> RedisBackend:
    """Open the Redis that *url* names; the first request connects. *clock* is not used: the server's judges expiry.

    Raises:
        ConfigError: The URL names no server, or an option is unknown or doesn't fit.
    """
    if url.scheme.endswith("+sentinel"):
        sentinel_options = url.options(SentinelOptions)
        primary = primary_of(url, sentinel_options)
        _require_tls(url, primary, sentinel_options)
        return RedisBackend(SentinelClient(primary, sentinel_options, credentials))
    options = url.options(Options)
    address = address_of(url, options)
    _require_tls(url, address, options)
    kind = ClusterClient if options.cluster else Client
    return RedisBackend(kind(address, options, credentials))


def _require_tls(url: Url, address: Address, options: Options) -> None:
    if not address.is_tls and (options.ca or options.cert or options.key or not options.verifies):
        remedy = "leave them out" if address.socket else f"write {url.scheme.replace('s', 'ss', 1)}://"
        raise ConfigError(f"{str(url)!r} has options for TLS, but doesn't use TLS; {remedy}")


class RedisBackend:
    """A Redis in use."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.warnings: Sequence[Fact] = client.warnings
        self._wake = Wake(client)
        self.leases: RedisLeases = RedisLeases(client, self._wake)
        self.broker: RedisBroker = RedisBroker(client, self._wake)

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report certificates that were replaced by what can't be used."""
        if (tls := self._client.tls) is not None:
            tls.report_to(report)

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the server, or about each primary of a cluster."""
        return await diagnose(self._client)

    async def close(self) -> None:
        """Close every connection."""
        await close_in_order(partial(self._wake.close, self._client.options.timeout), self._client.close)
