"""The client of a Redis: errors translated, a pool for each event loop, scripts run in bounded time.

House rules:

- Each request has a time limit: ``timeout`` seconds for everything, the connection included.
- Nothing is retried here. A retry inside a lease verb would use up the time of the lease, and might execute a request
  twice; the caller decides whether to repeat it.
- A connection belongs to the loop that made it. Messages are sent and received on the caller's loop, locks are renewed
  on the renewal thread's: so each loop has its own pool.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary

from redis import asyncio as aioredis
from redis import exceptions

from tenure._backends.redis.address import Address, Endpoint, Options
from tenure._backends.redis.connections import (
    LoopConnections,
    close_on,
    has_waited_for_login,
    is_elsewhere,
    run_scripts,
    unquoted,
)
from tenure._backends.redis.scripts import LAYOUT, Answer, Argument, Call, Script
from tenure._connect_failures import Target
from tenure._logins import Logins, Source, logins_of
from tenure._opened import Fact
from tenure._option_files import require_readable
from tenure._redaction import redacted, redacting
from tenure._runtime.closing import close_together
from tenure._tls_context import ReloadingContext, shown_by, tls_context
from tenure._tls_failures import OwnCertificate, TlsAdvice
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

_SERVER = re.compile(r" (?:connecting to|reading from|writing to) (\S+:\d+)")


@redacting
def translate(
    error: Exception,
    place: str,
    *,
    worked: bool = False,
    permitted: bool = False,
    is_cluster: bool = False,
    own: OwnCertificate | None = None,
    source: str = "",
) -> TenureError:
    """Turn an error of redis-py about the Redis at *place* into one of ours.

    A permanent error is a ``ConfigError``, unless the client *worked* before (for rights: was *permitted*): then the
    server is being changed, and may work again. The password comes from *source*, or from the URL.
    """
    text = str(error).rstrip(".")
    said = redacted(text)
    target = replace(target_of(error, place, worked=worked, own=own), source=source)
    match error:
        case exceptions.ConnectionError() if failed := target.failure(error):
            return failed
        case exceptions.ResponseError() if _lacks_rights(error):
            return replace(target, worked=permitted).not_permitted(
                said, "grant it the keys and commands that docs/redis.md lists"
            )
        case exceptions.AuthenticationError() if text.startswith("Authentication required") and not source:
            return target.login_missing("write the password into the URL: redis://:PASSWORD@…")
        case exceptions.AuthenticationError():
            return target.login_refused(said, "check user and password in the URL")
        case exceptions.BusyLoadingError():
            return Unavailable(f"{place} is still loading its data; tenure tries again")
        case _ if is_elsewhere(error):
            said = redacted(unquoted(error))
            return Unavailable(f"{place} is a replica, or lost its primary: {said}; name the primary, or wait for it")
        case exceptions.OutOfMemoryError():
            return Unavailable(
                f"{place} is out of memory, and changed nothing: {said}; raise maxmemory, or drain queues"
            )
        case exceptions.ResponseError() if is_cluster and cluster_code(error) in ("ASK", "TRYAGAIN"):
            return Unavailable(f"{place} is moving the keys to another node; tenure tries again: {said}")
        case exceptions.ResponseError() if not is_cluster and cluster_code(error) in ("MOVED", "ASK", "CROSSSLOT"):
            return ConfigError(f"{place} is a node of a Redis Cluster ({said}); add cluster=true to the URL's options")
        case exceptions.ResponseError():
            return _refusal(unquoted(error), place)
        case exceptions.TimeoutError():
            return target.no_answer(None, _tls_hint(place, worked))
        case exceptions.ConnectionError() if " connecting to " in text:
            return target.unreachable(error)
        case exceptions.ConnectionError():
            return target.closed(said, _tls_hint(place, worked))
        case exceptions.RedisError():
            return Unavailable(f"the request to {place} failed: {said}")
    raise AssertionError("translate() got an error that is not the driver's") from error


_CLUSTER_CODES: dict[type[Exception], str] = {
    exceptions.MovedError: "MOVED",  # before AskError, of which it is a subclass
    exceptions.AskError: "ASK",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
}


def cluster_code(error: Exception) -> str:
    """Return the code of an error that only a cluster sends. Older versions of redis-py have one class for all."""
    for kind, code in _CLUSTER_CODES.items():
        if isinstance(error, kind):
            return code
    code = str(error).partition(" ")[0]
    return code if code in _CLUSTER_CODES.values() else ""


def _tls_hint(place: str, worked: bool) -> str:
    """Return another possible cause if no request has worked yet: the server may require TLS, or not support it."""
    if worked or place.partition(":")[0].endswith(("+sentinel", "+unix")):
        return ""
    if place.startswith("rediss:"):
        return "; if this server doesn't support TLS, write redis://"
    return "; if this server requires TLS, write rediss://"


def is_forbidden(error: TenureError) -> bool:
    """Return whether *error* is about rights, even if the user had them before."""
    return _lacks_rights(error.__cause__)


def _lacks_rights(error: BaseException | None) -> bool:
    return isinstance(error, exceptions.NoPermissionError) or str(error).startswith("The user executing the script")


def other_layout(found: str, keys: str, place: str) -> ConfigError:
    """Return the error for *keys* that a newer tenure has written in another layout."""
    return ConfigError(
        f"{place} holds {keys} in layout {found}, and this tenure knows layout {LAYOUT} only; update tenure in every "
        "process that uses it to the version that wrote this, or try the option prefix"
    )


def is_other_data(error: object) -> bool:
    """Return whether a list of names can't be written because another program has put other data under its key.

    Whatever is to be listed works without: only lists of names are wrong then, and the request for one tells that.
    """
    return isinstance(error, exceptions.ResponseError) and str(error).startswith("WRONGTYPE")


def without_arguments(error: exceptions.RedisError) -> exceptions.RedisError:
    """Return an error without the arguments that a server quotes of a command that it doesn't know: of AUTH, too."""
    text = unquoted(error)
    return error if text == str(error) else type(error)(text)


def _refusal(text: str, place: str) -> TenureError:
    """Translate an error that redis-py has no class for, by its text."""
    said = redacted(text)
    if text.startswith("LAYOUT "):
        _, found, keys = text.split(" ", 2)
        return other_layout(redacted(found), redacted(keys), place)
    if text.startswith("SEQUENCE "):
        return ConfigError(
            f"{place} has no number under {said.split(' ')[1]} that can rise, so nothing can be sent to this queue; "
            "set it to the highest sequence of its messages (the fields of the key that ends with state)"
        )
    if text.startswith("WRONGTYPE"):
        return ConfigError(f"{place} has other data under a key that tenure needs: {said}; try the option prefix")
    if "compiling script" in text:  # older servers don't know the first line of the scripts
        return ConfigError(f"{place} can't read tenure's scripts: {said}; tenure needs Redis 7.0 or newer, or Valkey")
    if "unknown command" in text.lower():
        return ConfigError(
            f"{place} lacks a command: {said}; tenure needs Redis 7.0 or newer, without renamed commands"
        )
    if "cluster support disabled" in text:
        return ConfigError(f"{place} is no node of a Redis Cluster: {said}; remove cluster=true")
    if "DB index" in text:
        return ConfigError(f"{place} has no such database: {said}; check the number after the slash")
    # MISCONF (its disk), NOREPLICAS, CLUSTERDOWN, BUSY (a script of another client), and future errors
    return Unavailable(f"{place} refused the request for now: {said}")


def target_of(
    error: Exception,
    place: str,
    *,
    worked: bool,
    own: OwnCertificate | None,
    plain: str = "for a server without TLS, write redis://",
) -> Target:
    """Return the server that *error* names, as the driver writes it; else the one of *place*, an address."""
    found = _SERVER.search(str(error))
    at = found[1] if found else place.partition("://")[2].partition("/")[0]
    where = "its unixsocket and unixsocketperm" if place.startswith("redis+unix:") else "host and port"
    tls = TlsAdvice(plain=plain, own=own)
    return Target(place, at, worked=worked, place=where, tls=tls)


def patience(lasts: float) -> float:
    """Return the seconds to wait for an answer about a lock of *lasts* seconds: there must be time left to repeat."""
    return max(1.0, lasts / 3)


class Client:
    """All connections to one Redis, by event loop."""

    is_cluster: ClassVar[bool] = False
    """Whether a script can reach the keys of one slot only."""

    def __init__(self, address: Address, options: Options, credentials: Source | None = None) -> None:
        files = require_readable(address, ca=options.ca, cert=options.cert, key=options.key)
        self.logins: Logins = logins_of(address, options, credentials, user=address.username, password=address.password)
        self.warnings: tuple[Fact, ...] = (*files, *self.logins.warnings)
        self.address = address
        self.options = options
        self.tls: ReloadingContext | None = _tls_of(address, options) if address.uses_tls else None
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnections] = WeakKeyDictionary()
        self.on_unanswered: Callable[[], object] | None = None
        """Called on the loop of a request that had no answer."""
        self.on_elsewhere: Callable[[], object] | None = None
        """Called on the loop of a request that a server has refused which is no primary."""
        self._closed = False
        self._worked = False
        self._permitted = False  # whether a script has run: a user without rights to write can still read

    async def endpoint_of(self, channel: str) -> Endpoint | None:
        """Return the node to listen to for *channel*; None if there is only one server."""
        return None

    def at(self, place: Endpoint | None) -> aioredis.Redis:
        """Return the running loop's own connections to the node that :meth:`endpoint_of` has named."""
        return self._connections().redis

    @property
    def own(self) -> OwnCertificate | None:
        """The certificate that this client shows, if it does."""
        return shown_by(self.tls)

    async def hosts(self) -> list[str]:
        """Return the hosts of the servers that this client sends to: more than the URL names, perhaps."""
        return [self.address.host]

    def forget_endpoints(self) -> None:
        """Forget the results of :meth:`endpoint_of`: a channel was not found there."""

    def _connections(self) -> LoopConnections:
        self.require_open()
        loop = asyncio.get_running_loop()
        connections = self._by_loop.get(loop)
        if connections is None:
            for ended in [known for known in self._by_loop if known.is_closed()]:
                del self._by_loop[ended]
            connections = self._by_loop[loop] = self._new_connections()
        return connections

    def _new_connections(self) -> LoopConnections:
        return LoopConnections(self.address, self.options, self.tls, self.logins)

    def require_open(self) -> None:
        """Raise ``ConfigError`` after :meth:`close`."""
        if self._closed:
            raise ConfigError("this backend was closed; connect again")

    def translated(self, error: Exception) -> TenureError:
        """Turn an error of redis-py into one of ours."""
        return translate(
            error,
            str(self.address),
            worked=self._worked,
            permitted=self._permitted,
            is_cluster=self.is_cluster,
            own=self.own if self.address.is_tls else None,
            source=self.logins.source,
        )

    async def send(self, request: Callable[[aioredis.Redis], Awaitable[T]], *, within: float | None = None) -> T:
        """Return the result of *request* within *within* seconds, if those are fewer than the timeout.

        Raises:
            Unavailable: There was no answer in time; the request may have been executed or not.
            ConfigError: The request can't work as it is, or the client was closed.
        """
        connections = self._connections()
        return await self._bounded(lambda limit: connections.send(request, limit), within)

    async def _bounded(self, request: Callable[[asyncio.Timeout], Awaitable[T]], within: float | None) -> T:
        """Return the result of *request* within *within* seconds; it gets the time limit. Raises like :meth:`send`."""
        within = self.options.timeout if within is None else min(within, self.options.timeout)
        try:
            async with asyncio.timeout(within) as limit:
                answer = await request(limit)
        except TimeoutError as error:
            unanswered = self.logins.unanswered(within)
            if unanswered is not None and has_waited_for_login(error.__cause__):
                raise unanswered from error
            self._note_unanswered()
            target = Target(self.address, timeout=self.options.timeout)
            raise target.no_answer(within, _tls_hint(str(self.address), self._worked)) from error
        except exceptions.RedisError as error:
            if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError)):
                self._note_unanswered()
            elif is_elsewhere(error) and self.on_elsewhere is not None:
                self.on_elsewhere()
            raise self.translated(error) from without_arguments(error)
        self._worked = True
        return answer

    def _note_unanswered(self) -> None:
        if self.on_unanswered is not None:
            self.on_unanswered()

    async def command(self, *words: Argument) -> Answer:
        """Run a command, and return its answer."""
        return await self.send(lambda redis: redis.execute_command(*words))  # type: ignore[no-untyped-call]

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: Argument,
        within: float | None = None,
    ) -> Answer:
        """Run *script*, and return its answer."""

        async def run(redis: aioredis.Redis) -> Answer:
            try:
                return await redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)  # type: ignore[no-untyped-call]
            except exceptions.NoScriptError:  # it was not executed, so it can be sent again; EVAL stores it
                return await redis.execute_command("EVAL", script.text, len(keys), *keys, *arguments)  # type: ignore[no-untyped-call]

        connections = self._connections()
        try:
            answer = await self.send(run, within=within)
        except Unavailable as error:
            self._note_outcome(connections, script, error)
            raise
        self._note_outcome(connections, script, None)
        self._permitted = True
        return answer

    def _note_outcome(self, connections: LoopConnections, script: Script, error: TenureError | None) -> None:
        """Note whether *script* was refused, by a server that may be the wrong one. One that is full is not."""
        cause = error.__cause__ if error is not None else None
        if error is None:
            connections.accepted(script.sha)
        elif isinstance(cause, exceptions.ResponseError) and not isinstance(cause, exceptions.OutOfMemoryError):
            connections.refused(script.sha)

    async def run_all(self, calls: Sequence[Call], *, within: float | None = None) -> list[Answer | Unavailable]:
        """Run many scripts in one round trip, and return their answers.

        Their keys may be in several slots. The answer of a script whose server can't be reached is ``Unavailable``.
        """
        return self._each(calls, await self.send(lambda redis: run_scripts(redis, calls), within=within))

    def _each(self, calls: Sequence[Call], answers: Sequence[Answer]) -> list[Answer | Unavailable]:
        """Return the *answers* to *calls*, temporary errors as ``Unavailable``; raise that if all are."""
        connections = self._connections()
        results: list[Answer | Unavailable] = []
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, exceptions.RedisError):
                error = self.translated(answer)
                error.__cause__ = answer
                self._note_outcome(connections, call.script, error)
                if not isinstance(error, Unavailable):
                    raise error
                results.append(error)
            else:
                self._note_outcome(connections, call.script, None)
                self._permitted = True
                results.append(answer)
        if results and all(isinstance(one, Unavailable) for one in results):
            raise results[0]
        return results

    async def run_noted(self, note: Call, call: Call, *, within: float | None = None) -> tuple[Answer, bool]:
        """Run *note*, then *call*; return the answer of *call*, and whether *note* was done."""
        noted, done = await self.send(lambda redis: run_scripts(redis, [note, call]), within=within)
        [answer] = self._each([call], [done])
        if is_other_data(noted):
            return answer, False
        return answer, not isinstance(self._each([note, call], [noted, done])[0], Unavailable)

    async def close(self) -> None:
        """Close every connection, on the loop that it belongs to."""
        await self._close({loop: connections.close for loop, connections in self._by_loop.items()})
        self._by_loop.clear()

    async def _close(self, closing: Mapping[asyncio.AbstractEventLoop, Callable[[], Awaitable[object]]]) -> None:
        self._closed = True
        within = self.options.timeout
        await close_together(*(partial(close_on, loop, close, within=within) for loop, close in closing.items()))


def _tls_of(address: Address, options: Options) -> ReloadingContext:
    return tls_context(
        address,
        ca=options.ca,
        cert=options.cert,
        key=options.key,
        check_hostname=options.check_hostname,
        verifies=options.verifies,
    )
