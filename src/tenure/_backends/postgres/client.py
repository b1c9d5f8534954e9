"""The client of a PostgreSQL: translates errors, keeps some connections for each loop, bounds every request in time.

No connection keeps any state from one request to the next: no session lock, no setting, no open transaction. So each
may be dropped at any moment, and a transaction pooler may be used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import asyncpg
from asyncpg.connect_utils import SessionAttribute
from asyncpg.exceptions import (
    ClientConfigurationError,
    InterfaceError,
    InternalClientError,
    TargetServerAttributeNotMatched,
)

from tenure._backends.postgres.address import Options, dsn_of, servers_of
from tenure._backends.postgres.connections import (
    DRIVER_ERRORS,
    Connection,
    LoopConnections,
    NoConnectionInTime,
    is_elsewhere,
)
from tenure._backends.postgres.encryption import Encryption, encryption_of
from tenure._backends.postgres.passwords import passwords_of, require_user, unreadable_in_home
from tenure._backends.postgres.statements import VERSION, works_with
from tenure._connect_failures import Target
from tenure._logins import Login, Source, logins_of
from tenure._opened import Fact
from tenure._redaction import redacted, redacting
from tenure._runtime.closing import close_together
from tenure._runtime.on_loop import on_loop
from tenure._secret import Secret, hide, revealed
from tenure._tls_context import own_certificate_in
from tenure._tls_failures import NoTls, TlsAdvice
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

_ROLLED_BACK = {"40001", "40P01"}  # serialization failure, deadlock: the request may be repeated
_NOT_SENT = ("cannot switch to state", "connection is closed")  # the driver's texts if an idle connection was closed

_REFUSED = {
    "3D000": "has no such database; create it with: createdb NAME",
    "0A000": "lacks a feature that tenure needs; use PostgreSQL 13 or newer",
}
_LOGINS = {
    "28P01": "check the password in the URL, in PGPASSWORD or in ~/.pgpass",
    "28000": "check the user, the password and the server's pg_hba.conf",
}
_NO_RIGHT = "42501"
_NOT_NOW = {
    "57P01": "is being shut down",
    "57P02": "had to restart after a crash",
    "57P03": "is starting or stopping",
    "53300": "has no connection left; raise max_connections, use smaller pools (option pool), or a pooler",
    "53100": "has no room left on its disk, and changed nothing; make room there",
    "53200": "has no memory left",
    "25006": "is a read-only standby or set to read only; tenure needs the primary: "
    "name all hosts in the URL, or wait until this one is the primary",
}
_LOCKED = "55P03"
_CANCELLED = "57014"
_UNKNOWN_PARAMETER = "08P01"
_MISSING = {"3F000", "42P01", "42883", "42703"}
_POOLED = {"26000", "42P05"}
_OF_CONNECTIONS = (OSError, EOFError, InterfaceError, InternalClientError, asyncpg.PostgresConnectionError)


class RowLocked(Unavailable):
    """Another transaction held a row that the request needed, for longer than it could wait."""


@redacting
def translate(
    error: Exception,
    url: Url,
    options: Options,
    encryption: Encryption,
    *,
    worked: bool,
    waited: float,
    source: str = "",
) -> TenureError:
    """Turn an error of the driver or the server, after *waited* seconds, into one of ours.

    A permanent error is a ``ConfigError``, unless the client *worked* before: then the database is being changed, and
    may work again.
    """
    said = redacted(str(error))
    code: str = getattr(error, "sqlstate", None) or ""
    target = _target(url, options, encryption, worked=worked, source=source)
    lasting = target.lasting
    match error:
        case TimeoutError(errno=None):
            return target.no_answer(waited)
        case ConnectionError() if "rejected SSL" in str(error):
            return target.unreachable(NoTls())
        case TargetServerAttributeNotMatched():
            return Unavailable(f"{url} {_NOT_NOW['25006']}")
        case _ if isinstance(error, _OF_CONNECTIONS) and (failed := target.failure(error)):
            return failed
        case asyncpg.PostgresError() if code in _REFUSED:
            return lasting(f"{url} {_REFUSED[code]} (the server reports: {said})")
        case asyncpg.PostgresError() if code in _LOGINS:
            return target.login_refused(said, _LOGINS[code])
        case asyncpg.PostgresError() if code == _NO_RIGHT:
            return target.not_permitted(
                said,
                "GRANT USAGE on its schema, and on its tables what the role needs, see docs/postgresql.md (Rights)",
            )
        case asyncpg.PostgresError() if code == _LOCKED:
            return RowLocked(
                f"{url} gave no answer within {waited:.2g} s: another transaction has locked the row; "
                "pg_locks and pg_stat_activity show it"
            )
        case asyncpg.PostgresError() if code == _CANCELLED:
            return Unavailable(f"{url} gave no answer within {waited:.2g} s, and cancelled the request")
        case asyncpg.PostgresError() if code in _NOT_NOW:
            return Unavailable(f"{url} {_NOT_NOW[code]}")
        case _ if is_elsewhere(error):
            return Unavailable(f"{url} {_NOT_NOW['25006']} (the server reports: {said})")
        case asyncpg.PostgresError() if code == _UNKNOWN_PARAMETER and options.options:
            return lasting(
                f"{url} refused its options= (the server reports: {said}); a pooler takes few of them, or none: leave "
                f"it out, connect without the pooler, or set them for the role with ALTER ROLE"
            )
        case asyncpg.PostgresError() if code in _MISSING:
            return lasting(f"{_no_schema(url, options)} (the server reports: {said})")
        case asyncpg.PostgresError() if code in _POOLED:
            return lasting(
                f"a pooler before {url} mixes up prepared statements; write prepared=false into the URL, and "
                "listen=false if it pools by transaction"
            )
        case asyncpg.DataError():  # its text may quote the value, which may be secret
            return ConfigError(f"{url} can't store a value: {type(error).__name__} (SQLSTATE {code})")
        case asyncpg.ConnectionDoesNotExistError():
            return target.closed(said)
        case asyncpg.PostgresError():
            return Unavailable(f"{url} failed: {said} (SQLSTATE {code or 'unknown'})")
        case _ if isinstance(error, _OF_CONNECTIONS):
            return target.unreachable(error)
    raise AssertionError("translate() got an error that is not the driver's") from error  # a TypeError is a bug


def _target(url: Url, options: Options, encryption: Encryption, *, worked: bool, source: str) -> Target:
    bound = "channel_binding=require means that the server is verified; " if encryption.binds else ""
    tls = TlsAdvice(
        authority=f"{bound}name its authority with sslrootcert=FILE",
        certificate="name one, and its key, with sslcert=FILE and sslkey=FILE",
        plain=f"turn TLS on there; or, if clear text is meant, write sslmode=disable (now {encryption.mode})",
        own=own_certificate_in(encryption.certificate) if encryption.certificate else None,
    )
    return Target(url, servers_of(url, options), worked=worked, tls=tls, timeout=options.timeout, source=source)


def _no_schema(url: Url, options: Options) -> str:
    return f"{url} has no schema {options.schema!r} for tenure, or one that is not complete; run: tenure migrate URL"


CONNECT_MIN = 5.0
"""Seconds that an attempt to connect may take, however short the requests: it takes more round trips than they do."""

ENDS_WITHIN = 1.0
"""Seconds for which an attempt to connect may go on that is not needed any more."""

# Types of arrays and of their elements, by their numbers, which never change. The driver would look them up on each
# new connection, in six round trips.
_ARRAYS = {1000: 16, 1001: 17, 1005: 21, 1007: 23, 1016: 20, 1021: 700, 1022: 701, 1231: 1700, 1185: 1184, 3807: 3802}


class Client:
    """A connected database: connections for each loop that uses it, and one more for urgent requests."""

    def __init__(self, url: Url, options: Options, credentials: Source | None = None) -> None:
        self.url = url
        self.options = options
        self._logins = logins_of(url, options, credentials, user=None, password=url.password or options.password)
        if options.passfile and not self._logins.is_fixed:
            raise ConfigError(f"{url} is given passfile= and {self._logins.source}; leave out one of them")
        if credentials is None:  # who may name another user
            require_user(url, options)
        self.encryption: Encryption = encryption_of(url, options)
        self._dsn = dsn_of(url, sslmode=self.encryption.mode, sslrootcert=self.encryption.authority)
        self.warnings: tuple[Fact, ...] = (*self.encryption.warnings, *self._logins.warnings)
        self._by_loop: dict[tuple[asyncio.AbstractEventLoop, bool], LoopConnections] = {}
        self._login_of = WeakKeyDictionary[Connection, Login]()
        self._quotable: list[Secret] = []
        """The passwords that a server may quote."""
        self._checked = False
        self._worked = False
        self._closed = False
        self._accepts_settings = True  # until a pooler has refused them

    async def fetch(
        self,
        statement: str,
        *values: object,
        within: float | None = None,
        queue_for: float | None = None,
        urgent: bool = False,
    ) -> list[asyncpg.Record]:
        """Return the rows of *statement*, run in a transaction of its own.

        Args:
            statement: The SQL.
            values: Its parameters $1, $2, …
            within: How many seconds it may take, if fewer than the option timeout.
            queue_for: How many of them it may wait for a connection, if fewer.
            urgent: Whether it uses the connection for urgent requests, and waits for no others.

        Raises:
            Unavailable: There was no answer in time: the statement may have been executed or not.
            ConfigError: The database can't be used as it is.
        """
        return await self.run(
            lambda connection: connection.fetch(statement, *values), within=within, queue_for=queue_for, urgent=urgent
        )

    async def run(
        self,
        work: Callable[[Connection], Awaitable[T]],
        *,
        within: float | None = None,
        queue_for: float | None = None,
        urgent: bool = False,
    ) -> T:
        """Return the result of *work* on a connection; it must leave no transaction open. Raises like :meth:`fetch`.

        *work* is called a second time if the first call certainly had no effect.
        """
        if not self._checked:
            within = await self._check_first(self.bound(within))
        answer = await self._run_unchecked(work, within, queue_for, urgent)
        self._worked = True
        return answer

    async def _run_unchecked(
        self,
        work: Callable[[Connection], Awaitable[T]],
        within: float | None = None,
        queue_for: float | None = None,
        urgent: bool = False,
    ) -> T:
        """Do the same as :meth:`run`, without a check of the schema."""
        if self._closed:
            raise Unavailable(f"{self.url} is closed; connect again")
        within = self.bound(within)
        connections = self._connections(urgent)
        for attempt in (1, 2):
            asked_at = time.monotonic()
            try:
                return await connections.run(work, within, within if queue_for is None else queue_for)
            except DRIVER_ERRORS as error:
                if isinstance(error, InterfaceError) and isinstance(
                    error, ValueError
                ):  # the driver can't encode a parameter: a bug of tenure, which is not translated
                    raise
                if attempt == 1 and _had_no_effect(error):
                    continue
                if isinstance(error, NoConnectionInTime) and (slow := self._logins.unanswered(within)) is not None:
                    raise slow from error
                raise self.translate(error, asked_at, within) from error
        raise AssertionError("the second attempt neither answered nor failed")

    def bound(self, within: float | None = None) -> float:
        """Return how many seconds a request may take if its caller waits for *within*."""
        return self.options.timeout if within is None else min(within, self.options.timeout)

    async def connect(self, **settings: str) -> Connection:
        """Open a connection, with *settings* of the server for it. The caller translates errors.

        If the caller is cancelled, this may go on for ``ENDS_WITHIN`` seconds.
        """
        return await self._logins.let_in(partial(self._connect, settings), _is_refused)

    async def _connect(self, settings: Mapping[str, str], login: Login) -> Connection:
        options = self.options
        if login.user is None and not self._logins.is_fixed:
            require_user(self.url, options)
        self._quotable = passwords_of(self.url, options)  # anew, as the driver does: the file may have changed
        hide(*self._quotable)
        options_for_server = {"options": options.options} if options.options else {}
        try:
            self.encryption.require_files(self.url)
        except ConfigError as error:  # they may be being replaced just now
            raise self._target().lasting(str(error)) from None
        try:
            connection = await _unless_given_up(
                asyncpg.connect(
                    self._dsn.reveal(),
                    user=login.user,  # what is None, the driver finds by itself
                    password=revealed(login.password),
                    timeout=options.connect_timeout or max(options.timeout, CONNECT_MIN),
                    statement_cache_size=200 if options.prepared else 0,
                    max_cached_statement_lifetime=0,
                    target_session_attrs=SessionAttribute(options.session_attrs),
                    # The server applies options first, so that they change none of our settings.
                    server_settings={**options_for_server, "application_name": options.application_name, **settings},
                )
            )
        except PermissionError as error:
            error.filename = error.filename or unreadable_in_home()
            raise
        except (ClientConfigurationError, ValueError) as error:
            if isinstance(error, OSError):  # a certificate that isn't trusted
                raise
            target = self._target()
            if failed := target.failure(error):
                raise failed from error
            # The driver may quote the URL with its password, so its text is not passed on.
            kind = type(error).__name__
            raise target.lasting(f"{self.url} is not an address that the driver can read ({kind}); check it") from None
        self._login_of[connection] = login
        connection.get_settings().register_data_types([_array(*one) for one in _ARRAYS.items()])
        return connection

    @property
    def source(self) -> str:
        """Where passwords come from, in words; empty: the URL, or what the driver finds by itself."""
        return self._logins.source

    def _target(self) -> Target:
        return _target(self.url, self.options, self.encryption, worked=self._worked, source=self._logins.source)

    async def _open(self) -> Connection:
        """Open a connection for requests, on which the server cancels statements that exceed the time limit.

        Whatever is set for the user, its transactions are ``read committed``: claims on a queue with limits need it. A
        pooler may refuse these settings; they are then not sent again, and the client has to cancel each request.
        """
        if self._accepts_settings:
            try:
                return await self.connect(
                    statement_timeout=str(max(1, round(self.options.timeout * 1000))),
                    default_transaction_isolation="read committed",
                )
            except asyncpg.PostgresError as error:
                if error.sqlstate != _UNKNOWN_PARAMETER:
                    raise
            self._accepts_settings = False
        return await self.connect()

    def translate(self, error: Exception, asked_at: float, within: float) -> TenureError:
        """Turn the driver's *error* about a request sent at *asked_at*, for *within* seconds, into one of ours."""
        waited = min(time.monotonic() - asked_at, within)
        return translate(
            error,
            self.url,
            self.options,
            self.encryption,
            worked=self._worked,
            waited=waited,
            source=self._logins.source,
        )

    async def close(self) -> None:
        """Close every connection, of every loop."""
        self._closed = True
        closing = [partial(on_loop, loop, connections.close) for (loop, _), connections in self._by_loop.items()]
        await close_together(*closing)
        self._by_loop.clear()

    def _connections(self, urgent: bool = False) -> LoopConnections:
        key = asyncio.get_running_loop(), urgent
        connections = self._by_loop.get(key)
        if connections is None:
            for old in [one for one in self._by_loop if one[0].is_closed()]:
                del self._by_loop[old]
            size = 1 if urgent else self.options.pool
            connections = self._by_loop[key] = LoopConnections(self._open, size, self._is_over)
        return connections

    def _is_over(self, connection: Connection) -> bool:
        login = self._login_of.get(connection)
        return login is not None and self._logins.replaces(login)

    async def _check_first(self, within: float) -> float:
        """Check the schema's version, once for all requests that wait for it; return the rest of *within*."""
        connections, asked_at = self._connections(), time.monotonic()
        if connections.schema_check is None:
            connections.schema_check = asyncio.get_running_loop().create_task(
                self._check(), name="tenure-postgres-schema"
            )
            connections.schema_check.add_done_callback(connections.schema_checked)
        try:
            async with asyncio.timeout(within):
                await asyncio.shield(connections.schema_check)
        except TimeoutError as error:
            raise self.translate(error, asked_at, within) from error
        return max(0.001, within - (time.monotonic() - asked_at))

    async def _check(self) -> None:
        schema = self.options.schema
        rows = await self._run_unchecked(
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


async def _unless_given_up(opening: Coroutine[Any, Any, Connection]) -> Connection:
    """Return the connection that comes of *opening*; if the caller is cancelled, let it end by itself for a moment.

    An attempt of the driver that is cancelled when its socket has just been connected leaves a failed future behind, of
    which asyncio writes a traceback: below the one line for which a command ends, for instance.
    """
    attempt = asyncio.ensure_future(opening)
    try:
        await asyncio.wait({attempt})
    except asyncio.CancelledError:
        attempt.add_done_callback(_terminate)
        try:
            await asyncio.wait({attempt}, timeout=ENDS_WITHIN)
        finally:
            attempt.cancel()
        await asyncio.wait({attempt})
        raise
    return attempt.result()


def _terminate(attempt: asyncio.Future[Connection]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().terminate()


def _is_refused(error: Exception) -> bool:
    return isinstance(error, asyncpg.PostgresError) and error.sqlstate in _LOGINS


def _had_no_effect(error: Exception) -> bool:
    if isinstance(error, InterfaceError | InternalClientError):
        return any(text in str(error) for text in _NOT_SENT)
    return getattr(error, "sqlstate", None) in _ROLLED_BACK


def _array(number: int, element: int) -> dict[str, object]:
    """Describe an array type as the driver's own look-up of it would."""
    unused = dict.fromkeys(("range_subtype", "attrtypoids", "attrnames", "basetype", "basetype_name", "elemtype_name"))
    return unused | {
        "oid": number,
        "ns": "pg_catalog",
        "name": f"_{element}",
        "kind": b"b",
        "elemtype": element,
        "elemdelim": ",",
    }
