"""The way to a Redis: its errors and its address, a pool for each event loop, scripts run in bounded time.

House rules:

- No question without a bound: each has ``timeout`` seconds for everything, the connection included.
- Nothing is retried here. A retry inside a lease verb would spend the time of the lease, and count twice what may have
  been done; whoever asks knows whether to ask again.
- A connection belongs to the loop that made it. Messages travel on the caller's loop, locks are renewed on the
  keeper's: so each loop has its own pool.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha1
from importlib import resources
from inspect import signature
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

Argument = str | bytes | int
Endpoint = tuple[str, int]
"""Host and port of a server."""
HEAD_START = 0.2
"""For so many seconds one of several servers may think about an answer before another one is asked, too."""
Answer = Any
"""What Redis returns: bytes, numbers, None, and lists of them."""


def translate(
    error: Exception, place: str, *, worked: bool = False, permitted: bool = False, is_cluster: bool = False
) -> TenureError:
    """Turn what redis-py says about the Redis at *place* into one of ours.

    What can never work is a ``ConfigError``, unless it *worked* before (for rights: what we do was *permitted*): then
    somebody is changing the server, and it may work again.
    """
    said = str(error).rstrip(".")
    match error:
        case exceptions.ResponseError() if _lacks_rights(error):
            forbidden = (
                f"{place} does not permit this user what tenure does: {said}; "
                "grant it the keys and commands that docs/redis.md lists"
            )
            return Unavailable(f"{forbidden} (it was permitted before)") if permitted else ConfigError(forbidden)
        case exceptions.AuthenticationError():
            none = f"{place} wants a password, and was given none; write it into the URL: redis://:PASSWORD@…"
            wrong = f"{place} refused the user or the password: {said}; check both in the URL"
            refused = none if said.startswith("Authentication required") else wrong
            return Unavailable(refused) if worked else ConfigError(refused)
        case exceptions.ReadOnlyError() | exceptions.MasterDownError():
            return Unavailable(f"{place} is a replica, or lost its primary: {said}; name the primary, or wait for it")
        case exceptions.BusyLoadingError():
            return Unavailable(f"{place} is still loading its data; it is tried again")
        case exceptions.OutOfMemoryError():
            return Unavailable(f"{place} is out of memory, and took nothing: {said}; raise maxmemory, or drain queues")
        case exceptions.ResponseError() if is_cluster and cluster_word(error) in ("ASK", "TRYAGAIN"):
            return Unavailable(f"{place} is moving what was asked for to another node; it is asked again: {said}")
        case exceptions.ResponseError() if not is_cluster and cluster_word(error) in ("MOVED", "ASK", "CROSSSLOT"):
            return ConfigError(f"{place} is a node of a Redis Cluster ({said}); add cluster=true to the URL's options")
        case exceptions.ResponseError():
            return _refusal(said, place)
        case exceptions.TimeoutError():
            # Not "raise the option timeout": what is asked about a lease or a lock has less time.
            return Unavailable(
                f"{place} gave no answer in time ({said}); what was asked may be done{_other(place, worked)}"
            )
        case exceptions.ConnectionError():
            if certificate := certificate_error(error):
                untrusted = f"{place} showed a certificate that is not trusted: {certificate}; check the option ca"
                return Unavailable(untrusted) if worked else ConfigError(untrusted)
            if " connecting to " in said:
                return Unavailable(
                    f"{place} can't be reached: {said}; check host and port, and whether the server runs"
                )
            return Unavailable(f"{place} hung up: {said}; what was asked may be done{_other(place, worked)}")
        case exceptions.RedisError():
            return Unavailable(f"{place} could not be asked: {said}")
    raise AssertionError("translate() got a foreign error") from error


_OF_CLUSTERS: dict[type[Exception], str] = {
    exceptions.MovedError: "MOVED",  # before AskError, of which it is a kind
    exceptions.AskError: "ASK",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
}


def cluster_word(error: Exception) -> str:
    """Return what only a cluster says, in its own word. Older versions of redis-py have one class for all of them."""
    for kind, word in _OF_CLUSTERS.items():
        if isinstance(error, kind):
            return word
    said = str(error).partition(" ")[0]
    return said if said in _OF_CLUSTERS.values() else ""


def _other(place: str, worked: bool) -> str:
    """Say what else may be wrong where nothing has worked yet: each sort of server is deaf to the other's clients."""
    if worked or place.partition(":")[0].endswith("+sentinel"):
        return ""
    if place.startswith("rediss:"):
        return "; if this server speaks no TLS, write redis://"
    return "; if this server speaks TLS only, write rediss://"


def is_forbidden(error: TenureError) -> bool:
    """Tell whether *error* is about rights, whatever was permitted before."""
    return _lacks_rights(error.__cause__)


def _lacks_rights(error: BaseException | None) -> bool:
    return isinstance(error, exceptions.NoPermissionError) or str(error).startswith("The user executing the script")


LAYOUT = 1
"""The version of the layout of our keys: as in the scripts."""


def other_layout(found: str, keys: str, place: str) -> ConfigError:
    """Return what to say of *keys* that a newer tenure has written in another layout."""
    return ConfigError(
        f"{place} holds {keys} in layout {found}, and this tenure knows layout {LAYOUT} only; update tenure in every "
        "process that uses it to the version that wrote this, or try the option prefix"
    )


def _refusal(said: str, place: str) -> TenureError:
    """Translate an error that redis-py has no class for, by the word it begins with."""
    if said.startswith("LAYOUT "):
        _, found, keys = said.split(" ", 2)
        return other_layout(found, keys, place)
    if said.startswith("WRONGTYPE"):
        return ConfigError(f"{place} has something else under a key that tenure needs: {said}; try the option prefix")
    if "compiling script" in said:  # older ones don't know the first line
        return ConfigError(f"{place} can't read tenure's scripts: {said}; tenure needs Redis 7.0 or newer, or Valkey")
    if "unknown command" in said.lower():
        return ConfigError(f"{place} lacks a command: {said}; tenure needs Redis 7.0 or newer, with nothing renamed")
    if "cluster support disabled" in said:
        return ConfigError(f"{place} is no node of a Redis Cluster: {said}; leave out cluster=true")
    if "DB index" in said:
        return ConfigError(f"{place} has no such database: {said}; check the number after the slash")
    # MISCONF (its disk), NOREPLICAS, CLUSTERDOWN, BUSY (another's script), and what is to come
    return Unavailable(f"{place} refused for now: {said}")


def certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return what was wrong with a certificate, if that is what *error* is about."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None


# --- the address -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``redis:`` URL.

    Args:
        timeout: How many seconds a question may take, connecting included.
        connections: How many connections each event loop may have open at once.
        prefix: Begins every key and channel of ours.
        lease_prefix: Begins the key of a lease, instead of ``PREFIXlease:``; empty, the key is the name itself.
        ca: A file with the certificates to trust, instead of the system's (with TLS only).
        cert: A file with our own certificate, where the server wants one.
        key: A file with its key.
        check_hostname: Whether the server's certificate must be for the host in the URL.
        cluster: Whether the URL names a node of a Redis Cluster, any of them.
    """

    timeout: float = 5.0
    connections: int = 16
    prefix: str = "tenure:"
    lease_prefix: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True
    cluster: bool = False

    def __post_init__(self) -> None:
        if not 0.01 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.01 to 60 seconds, not {self.timeout:g}; try timeout=5")
        if not 1 <= self.connections <= 1_000:
            raise ConfigError(f"connections must be from 1 to 1000, not {self.connections}; try connections=16")
        for name in ("prefix", "lease_prefix"):
            if set(getattr(self, name) or "") & set("{}"):
                raise ConfigError(f"{name} must hold no braces: they say where a key lies in a cluster")

    @property
    def leases(self) -> str:
        """Begins the key of a lease."""
        return f"{self.prefix}lease:" if self.lease_prefix is None else self.lease_prefix


@dataclass(frozen=True, slots=True)
class Address:
    """Where a Redis is, and who we are there."""

    host: str
    port: int
    database: int
    username: str | None
    password: str | None = field(repr=False)
    is_tls: bool

    def __str__(self) -> str:
        return f"{'rediss' if self.is_tls else 'redis'}://{self.host}:{self.port}/{self.database}"


def address_of(url: Url) -> Address:
    """Return the address that *url* names.

    Raises:
        ConfigError: It is spelled as something else.
    """
    right = f"write {url.scheme}://[[user]:password@]host[:port][/database]"
    parts = urlsplit(url.written)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        # Not told from what: a password that is not percent-encoded may have ended up in the port.
        raise ConfigError(
            f"{str(url)!r} has a port that is no number; {right}, and percent-encode what is special in the password"
        ) from None
    if not host:
        raise ConfigError(f"{str(url)!r} names no host; {right}")
    database = parts.path.strip("/")
    if database and not database.isdecimal():
        raise ConfigError(f"{str(url)!r} has a database that is no number; {right}")
    return Address(
        host,
        port or 6379,
        int(database or 0),
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        url.scheme == "rediss",
    )


# --- scripts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, known to the server by the hash of its text: so old and new versions of us live side by side."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


GROWING = frozenset({"send"})
"""Scripts that a server without memory refuses before their first write. All others work there: they free memory, or
keep what is held."""


@cache
def scripts(file: str, *, is_cluster: bool = False) -> dict[str, Script]:
    """Return the scripts of *file*, a Lua file of this folder, by the name above each; "common" stands before all.

    In a cluster, what a script publishes goes to the shard that it runs on, and not over the bus to every node.
    """
    text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
    if is_cluster:
        text = text.replace("'PUBLISH'", "'SPUBLISH'").replace("'NUMSUB'", "'SHARDNUMSUB'")
    blocks = re.split(r"^-- name: (\w+).*\n", text, flags=re.MULTILINE)
    named = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    common = named.pop("common", "")
    return {name: Script.of(_flags(name) + common + text) for name, text in named.items()}


def _flags(name: str) -> str:
    # With a first line of this kind, Redis decides before a script begins whether it may; else at some of its writes.
    return "#!lua\n" if name in GROWING else "#!lua flags=allow-oom\n"


NOTE, NOTE_GROWING = (
    Script.of(head + "redis.call('SADD', KEYS[1], unpack(ARGV))") for head in map(_flags, ("", "send"))
)
"""Add names to a list of them: always, and where there is memory for more."""


@dataclass(frozen=True, slots=True)
class Call:
    """A script with the keys and arguments that it is to be run with."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]


# --- connections -------------------------------------------------------------------------------------------------

_ASTRAY = exceptions.ReadOnlyError, exceptions.MasterDownError
"""What is said by who is no primary."""
_CUT_OFF = exceptions.ConnectionError, exceptions.TimeoutError, OSError
"""How a question ends that has found no server, or none that answers. If its time is up first, it is cancelled."""


def is_cut_off(error: BaseException, limit: asyncio.Timeout) -> bool:
    """Tell whether *error* speaks against the way to the server: a caller who no longer wants an answer does not."""
    return isinstance(error, _CUT_OFF) or (isinstance(error, asyncio.CancelledError) and limit.expired())


def patience(lasts: float) -> float:
    """Return for how long to wait for an answer about what *lasts* so long: there must be time left to ask again."""
    return max(1.0, lasts / 3)


class Client:
    """All connections to one Redis, by event loop."""

    is_cluster: ClassVar[bool] = False
    """Whether a script can reach the keys of one slot only."""

    def __init__(self, address: Address, options: Options) -> None:
        require_files(address, options)
        self.address = address
        self.options = options
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnections] = WeakKeyDictionary()
        self._closed = False
        self._worked = False
        self._permitted = False  # once a script has run: who may not change anything can still look

    async def place_of(self, channel: str) -> Endpoint | None:
        """Return the node on which *channel* is to be listened to; None if there is but one server."""
        return None

    def at(self, place: Endpoint | None) -> aioredis.Redis:
        """Return the running loop's own connections to what :meth:`place_of` has named."""
        return self._line().redis

    def forget_places(self) -> None:
        """Ask anew for what :meth:`place_of` tells: some channel was not found there."""

    def _line(self) -> LoopConnections:
        self.require_open()
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is None:
            for ended in [known for known in self._lines if known.is_closed()]:
                del self._lines[ended]
            line = self._lines[loop] = self._new_line()
        return line

    def _new_line(self) -> LoopConnections:
        return LoopConnections(self.address, self.options)

    def require_open(self) -> None:
        """Refuse to be used after the end."""
        if self._closed:
            raise ConfigError("this backend was closed; connect again")

    def translated(self, error: Exception) -> TenureError:
        """Turn what redis-py says into one of ours."""
        return translate(
            error, str(self.address), worked=self._worked, permitted=self._permitted, is_cluster=self.is_cluster
        )

    async def ask(self, question: Callable[[aioredis.Redis], Awaitable[T]], *, within: float | None = None) -> T:
        """Return what *question* learns from Redis, *within* so many seconds, if those are fewer than the timeout.

        Raises:
            Unavailable: There was no answer in time; what was asked may be done or not.
            ConfigError: It can't work as it is, or we are closed.
        """
        line = self._line()
        return await self._bounded(lambda limit: line.ask(question, limit), within)

    async def _bounded(self, question: Callable[[asyncio.Timeout], Awaitable[T]], within: float | None) -> T:
        """Return what *question* learns within the time given, whose end it can see. May raise as :meth:`ask`."""
        within = self.options.timeout if within is None else min(within, self.options.timeout)
        try:
            async with asyncio.timeout(within) as limit:
                answer = await question(limit)
        except TimeoutError as error:
            raise self.translated(exceptions.TimeoutError(f"within {within:g} s")) from error
        except exceptions.RedisError as error:
            raise self.translated(error) from error
        self._worked = True
        return answer

    async def command(self, *words: Argument) -> Answer:
        """Give a command, and return its answer."""
        return await self.ask(lambda redis: redis.execute_command(*words))  # type: ignore[no-untyped-call]

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: Argument,
        within: float | None = None,
    ) -> Answer:
        """Run *script*, and return what it returns."""

        async def run(redis: aioredis.Redis) -> Answer:
            try:
                return await redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)  # type: ignore[no-untyped-call]
            except exceptions.NoScriptError:  # not run, so it may be run now; EVAL leaves it known
                return await redis.execute_command("EVAL", script.text, len(keys), *keys, *arguments)  # type: ignore[no-untyped-call]

        answer = await self.ask(run, within=within)
        self._permitted = True
        return answer

    async def run_all(self, calls: Sequence[Call], *, within: float | None = None) -> list[Answer | Unavailable]:
        """Run many scripts in one round trip, and return what each returns.

        They may lie in several slots. Where some lie on a server that can't be asked, it is ``Unavailable`` for those.
        """

        async def run_all(redis: aioredis.Redis) -> list[Answer]:
            answers = await pipelined(redis, calls)
            if any(isinstance(answer, exceptions.NoScriptError) for answer in answers):
                for text in {call.script.text for call in calls}:
                    await redis.script_load(text)
                missed = [i for i, answer in enumerate(answers) if isinstance(answer, exceptions.NoScriptError)]
                again = await pipelined(redis, [calls[i] for i in missed])
                for i, answer in zip(missed, again, strict=True):
                    answers[i] = answer
            return answers

        return self._each(await self.ask(run_all, within=within))

    def _each(self, answers: Sequence[Answer]) -> list[Answer | Unavailable]:
        """Return *answers* with what could not be done just now as ``Unavailable``; raise that if nothing could."""
        told: list[Answer | Unavailable] = []
        for answer in answers:
            if isinstance(answer, exceptions.RedisError):
                error = self.translated(answer)
                error.__cause__ = answer
                if not isinstance(error, Unavailable):
                    raise error
                told.append(error)
            else:
                self._permitted = True
                told.append(answer)
        if told and all(isinstance(one, Unavailable) for one in told):
            raise told[0]
        return told

    async def run_noted(self, note: Call, call: Call, *, within: float | None = None) -> tuple[Answer, bool]:
        """Run *note*, then *call*; return what *call* returns, and whether *note* was done."""
        noted, answer = await self.run_all([note, call], within=within)
        if isinstance(answer, Unavailable):
            raise answer
        return answer, not isinstance(noted, Unavailable)

    async def close(self) -> None:
        """Close every connection, on the loop that it belongs to."""
        await self._close({loop: line.close for loop, line in self._lines.items()})
        self._lines.clear()

    async def _close(self, closing: Mapping[asyncio.AbstractEventLoop, Callable[[], Awaitable[object]]]) -> None:
        self._closed = True
        # All at once: a server that is stuck keeps each of them waiting.
        within = self.options.timeout
        await asyncio.gather(*(on_loop(loop, close, within=within) for loop, close in closing.items()))


class LoopConnections:
    """The way of one loop to one server: a pool of connections, and a new one when those lead nowhere any longer."""

    def __init__(
        self, address: Address, options: Options, connect: Callable[[Address, Options], aioredis.Redis] | None = None
    ) -> None:
        self._address = address
        self._options = options
        self._connect = connect or connected
        self.redis: aioredis.Redis = self._connect(address, options)
        self._has_idle = False
        self._left: set[aioredis.Redis] = set()
        self._burials: set[asyncio.Task[None]] = set()

    async def ask(self, question: Callable[[aioredis.Redis], Awaitable[T]], limit: asyncio.Timeout) -> T:
        """Return what *question* learns within *limit*, over connections that are taken to lead to a server."""
        redis = self.redis
        try:
            answer = await question(redis)
        except exceptions.ResponseError as error:
            self._has_idle = True
            if isinstance(error, _ASTRAY):
                self._leave(redis)
            raise
        except BaseException as error:
            # The driver closes the connection of a question that was given up in the middle; the others are as good.
            if self._has_idle and is_cut_off(error, limit):
                self._leave(redis)
            raise
        self._has_idle = True
        return answer

    async def command(self, limit: asyncio.Timeout, *words: Argument) -> Answer:
        """Give a command, and return its answer."""
        return await self.ask(lambda redis: redis.execute_command(*words), limit)  # type: ignore[no-untyped-call]

    def _leave(self, redis: aioredis.Redis) -> None:
        """Ask nothing more over the connections of *redis*: where one leads astray or nowhere, so may the others.

        A name may belong to another server by now, and is looked up for new connections only; a server that was turned
        into a replica does not close those that stand; and what a firewall has forgotten is silent for good.
        """
        if self.redis is redis:
            self._has_idle = False
            self.redis = self._connect(self._address, self._options)
            self._left.add(redis)
            # By then all that is still asked over them has ended.
            asyncio.get_running_loop().call_later(2 * self._options.timeout, self._bury, redis)

    def _bury(self, redis: aioredis.Redis) -> None:
        if redis in self._left:
            self._left.discard(redis)
            burial = asyncio.ensure_future(_hung_up(redis))
            self._burials.add(burial)  # a loop lets tasks go that nobody holds
            burial.add_done_callback(self._burials.discard)

    async def close(self) -> None:
        """Close every connection."""
        left, self._left = self._left, set()
        await asyncio.gather(*(redis.aclose() for redis in (self.redis, *left)), *self._burials)


async def _hung_up(redis: aioredis.Redis) -> None:
    """Close the idle connections of *redis*: a subscription may still be heard on another, and ends by itself."""
    with suppress(exceptions.RedisError, OSError):
        await redis.connection_pool.disconnect(inuse_connections=False)


async def on_loop(loop: asyncio.AbstractEventLoop, act: Callable[[], Awaitable[object]], *, within: float) -> None:
    """Do *act* on *loop*, if that still turns, and wait for its end, whatever it is."""

    async def run() -> None:
        with suppress(exceptions.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(within):
                await act()

    if loop is asyncio.get_running_loop():
        await run()
    elif loop.is_running():
        running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))
        await asyncio.wait({running}, timeout=within)  # that loop may be blocked, or end meanwhile


async def pipelined(redis: aioredis.Redis, calls: Sequence[Call]) -> list[Answer]:
    """Run many scripts in one round trip; an answer may be an error."""
    async with redis.pipeline(transaction=False) as pipeline:
        for call in calls:
            pipeline.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments)
        answers: list[Answer] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, _ASTRAY):
            raise answer  # that goes for all of them, and for these connections
    return answers


def require_files(address: Address, options: Options) -> None:
    """Refuse an option that names a file that can't be read: the driver would only say that it can't connect."""
    for name in ("ca", "cert", "key"):
        path = getattr(options, name)
        if path is None:
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"{name}={path} of {address} can't be read: {error.strerror}; name the file as this process finds it"
            ) from error


async def first_told(
    places: Sequence[Endpoint], ask: Callable[[Endpoint], Coroutine[Any, Any, T]]
) -> tuple[Endpoint, T]:
    """Return which of *places* was the first to answer, and what. One that is silent must not use up all our time."""
    left, asked = list(places), dict[asyncio.Task[T], Endpoint]()
    try:
        while True:
            if left:
                place = left.pop(0)
                asked[asyncio.create_task(ask(place))] = place
            done, _ = await asyncio.wait(
                asked, timeout=HEAD_START if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for one in done:
                place = asked.pop(one)
                if (error := one.exception()) is None:
                    return place, one.result()
                is_silent = isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError))
                if not is_silent or not (asked or left):
                    # As its cause: the context is that of our caller, if that has an error in hand.
                    raise error from error.__cause__ or error.__context__
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


class Turns(aioredis.BlockingConnectionPool):
    """A pool whose connections go to the questions in the order in which they came.

    That of redis-py gives a free connection to the one that asks at this moment; so a busy sender, who asks again at
    once, gets back the connection that it has just left, and those that wait go without.
    """

    def __init__(self, max_connections: int, timeout: float, **options: Any) -> None:
        super().__init__(max_connections=max_connections, timeout=timeout, **options)
        self._patience = timeout
        self._turns = asyncio.Semaphore(max_connections)  # first come, first served
        self._taken: set[object] = set()

    async def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """Return a connection when it is our turn.

        Raises:
            ConnectionError: It was not, in time.
        """
        if self._turns.locked():
            try:
                async with asyncio.timeout(self._patience):
                    await self._turns.acquire()
            except TimeoutError:
                raise exceptions.ConnectionError("No connection available.") from None
        else:
            await self._turns.acquire()
        try:
            connection = await super().get_connection(*arguments, **options)  # type: ignore[no-untyped-call]
        except BaseException:
            self._turns.release()
            raise
        self._taken.add(connection)
        return connection

    async def release(self, connection: Any) -> None:
        """Take *connection* back; the next has its turn."""
        try:
            await super().release(connection)
        finally:
            if connection in self._taken:  # else it could not be made ready, and was never handed out
                self._taken.discard(connection)
                self._turns.release()


def connected(
    address: Address, options: Options, kind: type[aioredis.Connection] | None = None, **more: Any
) -> aioredis.Redis:
    """Return a pool of connections, of *kind* if it says so and made with *more*; none of them is open yet."""
    tls: dict[str, Any] = {}
    if address.is_tls:
        tls = {
            "ssl_ca_certs": options.ca,
            "ssl_certfile": options.cert,
            "ssl_keyfile": options.key,
            "ssl_check_hostname": options.check_hostname,
        }
    pool = Turns(
        max_connections=options.connections,
        timeout=options.timeout,
        connection_class=kind or (aioredis.SSLConnection if address.is_tls else aioredis.Connection),
        host=address.host,
        port=address.port,
        db=address.database,
        username=address.username,
        password=address.password,
        protocol=2,
        **_no_introduction(),
        # Each question is bounded as a whole, and redis-py's own way to do it may swallow a cancellation.
        socket_timeout=None,
        socket_connect_timeout=options.timeout,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        **tls,
        **more,
    )
    return aioredis.Redis.from_pool(pool)


def _no_introduction() -> dict[str, Any]:
    """Return what keeps redis-py from introducing itself on each connection: its commands may be forbidden."""
    if "driver_info" in signature(AbstractConnection.__init__).parameters:
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}  # older ones


def escaped(name: str) -> str:
    """Return *name* without braces, so that it can't say where a key lies; no two names give the same."""
    return re.sub("[%{}]", lambda found: f"%{ord(found[0]):02X}", name)


def runs(items: Sequence[T], same: Callable[[T, T], bool]) -> Iterator[Sequence[T]]:
    """Cut *items* into runs of neighbours that are the same."""
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or not same(items[start], items[end]):
            yield items[start:end]
            start = end
