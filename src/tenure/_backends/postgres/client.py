"""The way to a PostgreSQL: translate its errors, keep a few connections for each loop, bound every question in time.

No connection is special and none carries anything from one question to the next: no session lock, no setting, no
transaction left open. So each may be dropped at any moment, and a transaction pooler may stand in between.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import ssl
import time
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit
from weakref import WeakKeyDictionary

import asyncpg
from asyncpg.connect_utils import SessionAttribute
from asyncpg.exceptions import (
    ClientConfigurationError,
    InterfaceError,
    InternalClientError,
    TargetServerAttributeNotMatched,
)

from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

DRIVER_ERRORS = (OSError, EOFError, asyncpg.PostgresError, InterfaceError, InternalClientError)
"""What the driver raises when a question has failed, and not we."""

VERSION = 4
"""The version of the schema that this code works with."""

_CERTAINLY_NOT_DONE = {"40001", "40P01"}  # serialization failure, deadlock: rolled back, so it may be asked again
_NOT_SENT = (
    "cannot switch to state",
    "connection is closed",
)  # what the driver says of one that was dropped while idle
_DROPPED = {"25006", "26000", "42P05"}  # the connection is of no use: a standby, or mixed up by a pooler

_REFUSED = {
    "28P01": "refused the password; check it in the URL, in PGPASSWORD or in ~/.pgpass",
    "28000": "refused the login; check the user and the server's pg_hba.conf",
    "3D000": "has no such database; create it with: createdb NAME",
    "42501": "refuses what tenure needs for lack of rights; GRANT USAGE on its schema, and SELECT, INSERT, UPDATE and "
    "DELETE on all tables in it",
    "0A000": "can't do what tenure needs; use PostgreSQL 13 or newer",
}
_NOT_NOW = {
    "57P01": "is being shut down",
    "57P02": "had to restart after a crash",
    "57P03": "is starting or stopping",
    "53300": "has no connection left; raise max_connections, use smaller pools (option pool), or a pooler",
    "53100": "has no room left on its disk, and did nothing of it; make room there",
    "53200": "has no memory left",
    "25006": "is a read-only standby or set to read only, and nothing is decided by such a one; "
    "it is asked again once it is the primary, or name all hosts in the URL",
}
_LOCKED = "55P03"
_CALLED_OFF = "57014"
_UNKNOWN_PARAMETER = "08P01"
_MISSING = {"3F000", "42P01", "42883", "42703"}
_POOLED = {"26000", "42P05"}


class RowLocked(Unavailable):
    """Say that another transaction held a row that was asked for, longer than the question could wait."""


def translate(error: Exception, url: Url, options: Options, *, worked: bool, waited: float) -> TenureError:
    """Turn what the driver or the server said, after *waited* seconds, into one of ours.

    What could never work is a ``ConfigError``, unless it has worked before: then somebody is at it, and may be done
    soon. *worked* tells.
    """
    code: str = getattr(error, "sqlstate", None) or ""
    lasting: type[TenureError] = Unavailable if worked else ConfigError
    before = " (it worked before, so it is tried again)" if worked else ""
    match error:
        case TimeoutError():
            waited = round(waited, 2)
            option = " (option timeout)" if waited == round(options.timeout, 2) else ""  # a renewal is given less
            return Unavailable(f"{url} gave no answer within {waited:g} s{option}")
        case ssl.SSLCertVerificationError():
            return lasting(
                f"the certificate of {url} is not trusted: {error.verify_message}; name the right authority with "
                f"sslrootcert=…, and the host as the certificate does{before}"
            )
        case TargetServerAttributeNotMatched():
            return Unavailable(f"{url} {_NOT_NOW['25006']}")
        case asyncpg.PostgresError() if code in _REFUSED:
            return lasting(f"{url} {_REFUSED[code]} (it says: {error}){before}")
        case asyncpg.PostgresError() if code == _LOCKED:
            return RowLocked(
                f"{url} gave no answer within {waited:.2g} s: another transaction holds the row; "
                "pg_stat_activity shows it, and pg_locks"
            )
        case asyncpg.PostgresError() if code == _CALLED_OFF:
            return Unavailable(f"{url} gave no answer within {waited:.2g} s, and called the question off")
        case asyncpg.PostgresError() if code in _NOT_NOW:
            return Unavailable(f"{url} {_NOT_NOW[code]}")
        case asyncpg.PostgresError() if code in _MISSING:
            return lasting(f"{_no_schema(url, options)} (it says: {error}){before}")
        case asyncpg.PostgresError() if code in _POOLED:
            return lasting(
                f"a pooler before {url} mixes up prepared statements; write prepared=false into the URL, and "
                f"listen=false if it pools by transaction{before}"
            )
        case asyncpg.DataError():  # it may quote what it was given, and that may be secret
            return ConfigError(f"{url} can't keep a value that it was given: {type(error).__name__} (SQLSTATE {code})")
        case asyncpg.PostgresError():
            return Unavailable(f"{url} could not do it: {error} (SQLSTATE {code or 'unknown'})")
        case ConnectionError() if "rejected SSL" in str(error):
            return lasting(f"{url} doesn't speak TLS, and sslmode={options.sslmode} wants it{before}")
        case OSError() | EOFError() | InterfaceError() | InternalClientError():
            return Unavailable(
                f"{url} can't be reached: {_why(error)}; check host and port, and whether the server runs"
            )
    raise AssertionError("translate() got a foreign error") from error  # a TypeError is a bug: let it fly


def _why(error: Exception) -> str:
    """Say why there is no way to the server: the system's own word is plainer than asyncio's."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(error) or type(error).__name__


def _no_schema(url: Url, options: Options) -> str:
    return f"{url} has no schema {options.schema!r} for tenure, or one that is not complete; run: tenure migrate URL"


# --- the address -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``postgresql:`` URL: a few of our own, and those that every client of PostgreSQL knows.

    Args:
        schema: The PostgreSQL schema that tenure's tables and functions are in.
        pool: How many connections each event loop may have open, besides one for renewals.
        listen: Whether to hear of changes on one more connection. It can't stand behind a transaction pooler.
        prepared: Whether to keep prepared statements. Not behind a transaction pooler that doesn't follow them.
        timeout: For how many seconds at most to wait for an answer, and for a connection.
        connect_timeout: After how many seconds an attempt to connect is given up; ``timeout``, and at least 5, if None.
    """

    schema: str = "tenure"
    pool: int = 4
    listen: bool = True
    prepared: bool = True
    timeout: float = 5.0
    application_name: str = "tenure"
    connect_timeout: float | None = None
    target_session_attrs: Literal["read-write", "primary"] = "read-write"
    sslmode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] = "prefer"
    host: str | None = None
    port: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    passfile: str | None = None
    dbname: str | None = None
    service: str | None = None
    sslrootcert: str | None = None
    sslcert: str | None = None
    sslkey: str | None = None
    sslcrl: str | None = None
    sslpassword: str | None = field(default=None, repr=False)
    sslnegotiation: Literal["postgres", "direct"] | None = None
    ssl_min_protocol_version: str | None = None
    ssl_max_protocol_version: str | None = None
    krbsrvname: str | None = None
    gsslib: Literal["gssapi", "sspi"] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", self.schema) or self.schema.startswith("pg_"):
            raise ConfigError(
                f"schema must be up to 40 small letters, digits and underscores, and not begin with a digit or pg_, "
                f"not {self.schema!r}; try schema=tenure"
            )
        if not 1 <= self.pool <= 1_000:
            raise ConfigError(f"pool must be from 1 to 1000 connections, not {self.pool}; try pool=4")
        for name in ("timeout", "connect_timeout"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 3_600.0:
                raise ConfigError(f"{name} must be more than 0 and up to 3600 seconds, not {value:g}; try {name}=5")


_OURS = {"schema", "pool", "listen", "prepared", "timeout", "application_name", "connect_timeout"} | {
    "target_session_attrs"  # which is handed over by itself
}


def dsn_of(url: Url) -> str:
    """Return what the driver is to connect to: *url* without the options that are ours.

    Raises:
        ConfigError: It can't be read as an address.
    """
    parts = urlsplit(url.written)
    try:
        for host in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{host}").port
    except ValueError:
        # Not told from what: a password that is not percent-encoded may have ended up in the port.
        raise ConfigError(
            f"{url} has a port that is no number; percent-encode what is special in the password"
        ) from None
    left = {name: text for name, text in url.query.items() if name not in _OURS}
    return urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(left), ""))


assert {field.name for field in fields(Options)} >= _OURS


def require_files(url: Url, options: Options) -> None:
    """Refuse an option that names a file that can't be read: the driver would only say that it can't connect."""
    for name in ("sslrootcert", "sslcert", "sslkey", "sslcrl"):
        path = getattr(options, name)
        if path is None or path == "system":  # the system's own authorities
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"{name}={path} of {url} can't be read: {error.strerror}; name the file as this process finds it"
            ) from error


# --- SQL ---------------------------------------------------------------------------------------------------------


@cache
def text_of(file: str, schema: str) -> str:
    """Return a file of the folder ``sql``, for the tables in *schema*."""
    text = resources.files(__package__).joinpath("sql", file).read_text(encoding="utf-8")
    return text.replace("{schema}", schema)


def works_with(schema: str) -> str:
    """Return what asks which version of the code is the oldest that works with the schema as it is."""
    return (  # by way of jsonb, as not each version has the column
        "SELECT coalesce((to_jsonb(newest) ->> 'oldest')::integer, newest.version) "
        f"FROM {schema}.migration AS newest ORDER BY version DESC LIMIT 1"
    )


PLANS = tuple(
    f"{name} = {value}"
    for name, value in {
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
    }.items()
)
"""With these settings, each statement about queues has one right plan. Left alone, the planner would take another when
its statistics are of a time when the table was empty, or full: as the tables of queues are, in turns."""


@cache
def statements(file: str, schema: str) -> dict[str, str]:
    """Return the statements of *file* by the name that stands above each."""
    blocks = re.split(r"^-- name: (\w+)\n", text_of(file, schema), flags=re.MULTILINE)
    return dict(zip(blocks[1::2], (block.strip().rstrip(";") for block in blocks[2::2]), strict=True))


def milliseconds(seconds: float) -> str:
    """Return a bound for the server: a little shorter, so that its answer comes before the client gives up."""
    return str(max(1, int(seconds * 900)))


# --- connections -------------------------------------------------------------------------------------------------

CONNECT_MIN = 5.0
"""Seconds that an attempt to connect may take, however short the questions: it takes more round trips than they do."""

OPEN_PAUSE_MAX = 0.5
"""Seconds at most between two attempts to connect, of which the first has failed."""

SURE_WITHIN = 3.0
"""Seconds within which a connection whose question was given up must be of use again."""

# Types of arrays and of their elements, by their numbers, which never change. The driver would ask about them on each
# new connection, in six round trips.
_ARRAYS = {1000: 16, 1001: 17, 1005: 21, 1007: 23, 1016: 20, 1021: 700, 1022: 701, 1231: 1700, 1185: 1184, 3807: 3802}


class Client:
    """A database in use: lines of connections, for each loop that asks one, and one for what is urgent."""

    def __init__(self, url: Url, options: Options) -> None:
        self.url = url
        self.options = options
        self._dsn = dsn_of(url)
        require_files(url, options)
        self._lines: dict[tuple[asyncio.AbstractEventLoop, bool], LoopConnections] = {}
        self._checked = False
        self._worked = False
        self._closed = False
        self._takes_settings = True  # until something in between has refused them

    async def ask(
        self,
        statement: str,
        *values: object,
        within: float | None = None,
        queue_for: float | None = None,
        urgent: bool = False,
    ) -> list[asyncpg.Record]:
        """Return the rows that *statement* answers, in a transaction of its own.

        Args:
            statement: What is asked.
            values: What stands for $1, $2, … in it.
            within: How many seconds it may take, if fewer than the option timeout.
            queue_for: How many of them to wait for a connection, if fewer.
            urgent: Whether it has a connection to itself, and waits for nothing that is not.

        Raises:
            Unavailable: There was no answer within the time given: it may have been done or not.
            ConfigError: The database can't be used as it is.
        """
        return await self.work(
            lambda connection: connection.fetch(statement, *values), within=within, queue_for=queue_for, urgent=urgent
        )

    async def work(
        self,
        work: Callable[[Connection], Awaitable[T]],
        *,
        within: float | None = None,
        queue_for: float | None = None,
        urgent: bool = False,
    ) -> T:
        """Return what *work* does on a connection; it must leave no transaction open. May raise as :meth:`ask`.

        It may be done a second time, if the first had no effect for certain.
        """
        if not self._checked:
            within = await self._check_first(self.bound(within))
        answer = await self._unchecked(work, within, queue_for, urgent)
        self._worked = True
        return answer

    async def _unchecked(
        self,
        work: Callable[[Connection], Awaitable[T]],
        within: float | None = None,
        queue_for: float | None = None,
        urgent: bool = False,
    ) -> T:
        """Do as :meth:`work`, on whatever schema there is, or none."""
        if self._closed:
            raise Unavailable(f"{self.url} is closed; connect again")
        within = self.bound(within)
        line = self._line(urgent)
        for attempt in (1, 2):
            asked_at = time.monotonic()
            try:
                return await line.work(work, within, within if queue_for is None else queue_for)
            except DRIVER_ERRORS as error:
                if isinstance(error, InterfaceError) and isinstance(
                    error, ValueError
                ):  # the driver can't encode what we gave it: a bug of ours, let it fly
                    raise
                if attempt == 1 and _is_certainly_not_done(error):
                    continue
                raise self.translate(error, asked_at, within) from error
        raise AssertionError("the second attempt neither answered nor failed")

    def bound(self, within: float | None = None) -> float:
        """Return for how many seconds a question may take, given that its asker would wait for *within*."""
        return self.options.timeout if within is None else min(within, self.options.timeout)

    async def connect(self, **settings: str) -> Connection:
        """Open a connection, with *settings* of the server for it. The caller translates what is raised."""
        options = self.options
        try:
            connection = await asyncpg.connect(
                self._dsn,
                timeout=options.connect_timeout or max(options.timeout, CONNECT_MIN),
                statement_cache_size=200 if options.prepared else 0,
                max_cached_statement_lifetime=0,
                target_session_attrs=SessionAttribute(options.target_session_attrs),
                server_settings={"application_name": options.application_name, **settings},
            )
        except (ClientConfigurationError, ValueError) as error:
            if isinstance(error, OSError):  # a certificate that isn't trusted
                raise
            # The driver may quote the URL, password and all, so what it said is not passed on.
            kind = type(error).__name__
            raise ConfigError(f"{self.url} is not an address that the driver can read ({kind}); check it") from None
        connection.get_settings().register_data_types([_array(*one) for one in _ARRAYS.items()])
        return connection

    async def _open(self) -> Connection:
        """Open a connection for questions, on which the server gives up what nobody can wait for any longer.

        A pooler may refuse to set that, and is not asked again. Then the client has to call each question off.
        """
        if self._takes_settings:
            try:
                return await self.connect(statement_timeout=str(max(1, round(self.options.timeout * 1000))))
            except asyncpg.PostgresError as error:
                if error.sqlstate != _UNKNOWN_PARAMETER:
                    raise
            self._takes_settings = False
        return await self.connect()

    def translate(self, error: Exception, asked_at: float, within: float) -> TenureError:
        """Turn the driver's *error* into one of ours: asked when time.monotonic() told *asked_at*, *within* seconds."""
        waited = min(time.monotonic() - asked_at, within)
        return translate(error, self.url, self.options, worked=self._worked, waited=waited)

    async def close(self) -> None:
        """Close every connection, of every loop."""
        self._closed = True
        # All at once: a server that is stuck keeps each of them waiting.
        await asyncio.gather(*(on_loop(loop, line.close) for (loop, _), line in list(self._lines.items())))
        self._lines.clear()

    def _line(self, urgent: bool = False) -> LoopConnections:
        key = asyncio.get_running_loop(), urgent
        line = self._lines.get(key)
        if line is None:
            for old in [one for one in self._lines if one[0].is_closed()]:
                del self._lines[old]
            line = self._lines[key] = LoopConnections(self._open, 1 if urgent else self.options.pool)
        return line

    async def _check_first(self, within: float) -> float:
        """Find the schema as this code knows it, once for all who ask meanwhile; return what is left of *within*."""
        line, asked_at = self._line(), time.monotonic()
        if line.checking is None:
            line.checking = asyncio.get_running_loop().create_task(self._check(), name="tenure-postgres-check")
            line.checking.add_done_callback(line.checked)
        try:
            async with asyncio.timeout(within):
                await asyncio.shield(line.checking)
        except TimeoutError as error:
            raise self.translate(error, asked_at, within) from error
        return max(0.001, within - (time.monotonic() - asked_at))

    async def _check(self) -> None:
        schema = self.options.schema
        rows = await self._unchecked(
            lambda connection: connection.fetch(f"SELECT max(version), ({works_with(schema)}) FROM {schema}.migration")
        )
        found: int = rows[0][0] or 0
        if found < VERSION:
            raise ConfigError(
                f"the schema {self.options.schema!r} of {self.url} has version {found}, and this tenure needs "
                f"{VERSION}; run: tenure migrate URL"
            )
        if found > VERSION and rows[0][1] > VERSION:
            raise ConfigError(
                f"the schema {self.options.schema!r} of {self.url} has version {found}, made by a newer tenure than "
                f"this one, which knows {VERSION}; install that newer one here (tenure migrate doesn't go back)"
            )
        self._checked = True


def _is_certainly_not_done(error: Exception) -> bool:
    if isinstance(error, InterfaceError | InternalClientError):
        return any(said in str(error) for said in _NOT_SENT)
    return getattr(error, "sqlstate", None) in _CERTAINLY_NOT_DONE


def _array(number: int, element: int) -> dict[str, object]:
    """Describe an array type as the driver's own question about it would."""
    nothing = dict.fromkeys(("range_subtype", "attrtypoids", "attrnames", "basetype", "basetype_name", "elemtype_name"))
    return nothing | {
        "oid": number,
        "ns": "pg_catalog",
        "name": f"_{element}",
        "kind": b"b",
        "elemtype": element,
        "elemdelim": ",",
    }


@asynccontextmanager
async def transaction(connection: Connection, within: float) -> AsyncIterator[None]:
    """Make one step of several statements, each of which waits for locks no longer than *within*.

    The driver's own transaction, when called off, waits until the server has rolled back; this one leaves that to the
    line, which doubts the connection.
    """
    await connection.execute(f"BEGIN; SET LOCAL lock_timeout = {milliseconds(within)}")
    try:
        yield
    except Exception:
        with suppress(*DRIVER_ERRORS):
            await connection.execute("ROLLBACK")
        raise
    await connection.execute("COMMIT")


class LoopConnections:
    """The connections of one loop.

    A question neither opens a connection nor closes one. Those who find none wait in turn, while one attempt to connect
    is made for all of them, and more once it has succeeded; it goes on when they have given up. A connection whose
    question was given up is doubted: the server is told to call the question off, and if it answers, the connection is
    of use again. So a slow server, or a slow way to it, is not burdened with new connections.
    """

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, Connection]], size: int) -> None:
        self._connect = connect
        self._size = size
        self._is_closed = False
        self.checking: asyncio.Task[None] | None = None
        """Finds out whether the schema fits, for all who ask."""
        # The one that was opened first is the next: few stay busy, and few plan what is asked most.
        self._idle: list[Connection] = []
        self._opened_at = WeakKeyDictionary[Connection, float]()
        self._busy: set[Connection] = set()
        self._waiting: deque[asyncio.Future[Connection]] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._doubted: dict[asyncio.Task[None], Connection] = {}  # which may be as many again as the size
        self._is_reached = False  # whether the newest attempt to connect has succeeded, and nothing broke since
        self._failures = 0
        self._open_from = 0.0
        self._took = 0.0  # the newest answer

    def checked(self, checking: asyncio.Task[None]) -> None:
        """Take note that the schema was looked at, or could not be."""
        self.checking = None
        if not checking.cancelled():
            checking.exception()  # those who wait have it; if nobody does, asyncio need not complain

    async def work(self, work: Callable[[Connection], Awaitable[T]], within: float, queue_for: float) -> T:
        """Do *work* on a connection; waiting for one counts, too."""
        async with asyncio.timeout(within) as limit:
            connection = self._next() or await self._turn(limit, within, queue_for)
            return await self._work(connection, work, limit)

    # --- waiting for a connection ---

    def _next(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                self._busy.add(connection)
                return connection
            self._is_reached = False
        return None

    async def _turn(self, limit: asyncio.Timeout, within: float, queue_for: float) -> Connection:
        """Wait for a turn. Where there is more to do than can be done, giving up here costs the server nothing."""
        if self._is_closed:
            raise Unavailable("the backend was closed; connect again")
        loop = asyncio.get_running_loop()
        began = loop.time()
        turn: asyncio.Future[Connection] = loop.create_future()
        self._waiting.append(turn)
        self._open_more()
        try:
            await asyncio.wait({turn}, timeout=min(queue_for, 0.95 * within))
            if not turn.done() and self._busy:
                raise _too_busy(loop.time() - began)
            connection = await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result())
            turn.cancel()
            raise
        ends_at = limit.when()
        if ends_at is not None and ends_at - loop.time() < min(self._took, within / 4):
            self._give_back(connection)  # there is no time left for an answer
            raise _too_busy(loop.time() - began)
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        self._offer(connection)
        if self._waiting:  # it may have broken meanwhile
            self._open_more()

    def _offer(self, connection: Connection) -> None:
        """Give a connection to the first who waits, or keep it."""
        if connection.is_closed():
            return
        if self._is_closed or self._room() <= 0:
            connection.terminate()
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._busy.add(connection)
                turn.set_result(connection)
                return
        insort(self._idle, connection, key=lambda one: -self._opened_at[one])

    def _room(self) -> int:
        return self._size - len(self._busy) - len(self._idle)

    # --- at work ---

    async def _work(
        self, connection: Connection, work: Callable[[Connection], Awaitable[T]], limit: asyncio.Timeout
    ) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await work(connection)
        except asyncpg.PostgresError as error:
            if error.sqlstate in _DROPPED or (not connection.is_closed() and connection.is_in_transaction()):
                connection.terminate()
            elif connection.is_closed():
                self._doubt_all()
            self._give_back(connection)
            raise
        except BaseException as error:
            # Given up in the middle, it may say anything next. If it was silent or broken, so may be the others.
            self._busy.discard(connection)
            self._doubt(connection)
            if limit.expired() or not isinstance(error, asyncio.CancelledError):
                self._doubt_all()
            raise
        else:
            self._took = loop.time() - began
            self._give_back(connection)
            return answer
        finally:
            if self._waiting:
                self._open_more()

    def _doubt_all(self) -> None:
        self._is_reached = False
        idle, self._idle = self._idle, []
        for connection in idle:
            self._doubt(connection)

    def _doubt(self, connection: Connection) -> None:
        if connection.is_closed() or len(self._doubted) >= self._size or self._is_closed:
            connection.terminate()
            return
        doubting = asyncio.get_running_loop().create_task(self._make_sure(connection), name="tenure-postgres-doubt")
        self._doubted[doubting] = connection
        doubting.add_done_callback(self._doubted.pop)

    async def _make_sure(self, connection: Connection) -> None:
        """Use *connection* again if it answers. The driver has told the server to call off what was asked on it."""
        try:
            async with asyncio.timeout(SURE_WITHIN):
                await connection.execute("SELECT 1")  # after the answer to what was called off
        except DRIVER_ERRORS:
            connection.terminate()
        else:
            if not connection.is_closed() and connection.is_in_transaction():
                connection.terminate()
            self._offer(connection)

    # --- opening ---

    def _open_more(self) -> None:
        """Open connections for those who wait: one attempt, and as many as there is room for once it has succeeded."""
        most = min(self._room(), self._size if self._is_reached else 1) - len(self._opening)
        if most <= 0 or self._is_closed:
            return
        waiting = sum(not turn.done() for turn in self._waiting) - len(self._opening)
        for _ in range(min(most, waiting)):
            opening = asyncio.get_running_loop().create_task(self._open(), name="tenure-postgres-connect")
            self._opening.add(opening)
            opening.add_done_callback(self._opened)

    async def _open(self) -> None:
        if (pause := self._open_from - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(pause)
        if self._is_closed:
            return
        connection = await self._connect()
        self._is_reached, self._failures, self._open_from = True, 0, 0.0
        self._opened_at[connection] = asyncio.get_running_loop().time()
        self._offer(connection)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self._is_reached = False
            pause = min(OPEN_PAUSE_MAX, 0.02 * 2.0 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)
            self._failures += 1
            self._open_from = asyncio.get_running_loop().time() + pause
            if not self._busy:  # otherwise those who wait may be served all the same
                self._fail(error)
        self._open_more()

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            if not turn.done():
                turn.set_exception(error)

    async def close(self) -> None:
        """Close the connections: politely if they are idle."""
        self._is_closed = True
        self._fail(Unavailable("the backend was closed meanwhile; connect again"))
        for doubting, connection in list(self._doubted.items()):
            doubting.cancel()
            connection.terminate()
        for connection in list(self._busy):
            connection.terminate()
        idle, self._idle = self._idle, []
        await asyncio.gather(*(_farewell(connection) for connection in idle))
        if self._opening:
            _, late = await asyncio.wait(self._opening, timeout=1.0)
            for opening in late:
                opening.cancel()


def _too_busy(waited: float) -> Unavailable:
    return Unavailable(
        f"all connections were busy for {waited:.2g} s, so it was not even asked; if that happens often, "
        "use a larger pool (option pool), a longer ttl, or a faster server"
    )


async def _farewell(connection: Connection) -> None:
    with suppress(*DRIVER_ERRORS):
        await connection.close(timeout=1.0)


async def on_loop(loop: asyncio.AbstractEventLoop, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do *act* on another *loop*, if that still turns. If it doesn't, what was on it has gone with it."""
    if loop is asyncio.get_running_loop():
        await act()
    elif loop.is_running():
        with suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(act(), loop)), 5.0)
