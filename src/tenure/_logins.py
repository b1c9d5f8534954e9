"""What a store lets this client in by, if the URL has no password: it is asked for whenever a connection is made.

House rules:

- A password is replaced while connections are being made. So one that is refused is asked for once more, at once; the
  refusal counts if the answer is the same.
- Connections that are made together ask once. Between them, only what says how long it lasts is kept, and the answer of
  a command, as a command is slow.
- What lasts for a known time is replaced at a share of it; if the source fails then, or is slow, what there is goes on
  to its end.
- The caller's own code never runs on the renewal thread: a function runs in a thread, and what it awaits on the loop
  that has opened the backend; or there, if that is the loop of this thread, as calls that block have opened it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from tenure._credential_command import output_of
from tenure._credentials import AskCredentials, Credentials
from tenure._opened import Fact
from tenure._option_files import read_file, require_readable
from tenure._redaction import redacted
from tenure._runtime.tasks import is_cancelled
from tenure._runtime.threads import in_thread
from tenure._secret import HIDDEN, Secret, hide, path_shown
from tenure._tls_failures import lasting
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable, in_words

T = TypeVar("T")
Answer: TypeAlias = Credentials | str | Secret
"""What a function of the caller may return."""

PASSWORD_BYTES = 65_536
"""The longest password, or token, that a file or a command may have."""
RENEWED_AT = 0.75
"""The share of its time at which a login is replaced."""
TRIED_AGAIN = 0.1
"""The share of the time that is left then, after which it is tried again if that has failed."""
SLOW = 0.5
"""Seconds to wait for another login while there is one that the store still accepts."""
COMMAND_KEPT = 60.0
"""Seconds for which the answer of a command is used, unless a server refuses it."""
ASK_MAX = 60.0
"""Seconds that a command, or the caller's own code, may take."""
QUOTABLE = 8
"""So many of the newest passwords are not shown in what servers say: connections may have those of before."""


class Source(Protocol):
    """Where the newest credentials come from."""

    keeps: float
    """Seconds for which its answer is used again, if that doesn't say."""

    @property
    def name(self) -> str:
        """What it is, for messages."""
        ...

    async def ask(self) -> Credentials:
        """Return the credentials.

        Raises:
            ConfigError: They can't be read as they are.
            Unavailable: There are none now.
        """
        ...


@dataclass(frozen=True, slots=True)
class PasswordOptions:
    """The options of a URL that say where the password is, for a store that has passwords.

    Args:
        password_file: A file with nothing but the password, or a token; it is read for each new connection.
        password_command: A command that prints it; without a shell. It is run for new connections, at most once a
            minute unless the password is refused.
    """

    password_file: str | None = None
    password_command: Secret | None = None


@dataclass(frozen=True, slots=True)
class Login:
    """What one connection is made with."""

    user: str | None
    password: Secret | None
    renewed_at: float = math.inf
    """The time, by ``time.monotonic``, at which a connection should have another one."""
    ends_at: float = math.inf
    """The time at which the store stops accepting it."""

    def is_same(self, other: Login) -> bool:
        """Return whether a store that has refused the one refuses the other."""
        return (self.user, self.password) == (other.user, other.password)


class _Kept(NamedTuple):
    """A login for the connections to come."""

    login: Login
    until: float
    """When it is asked for again."""


class Logins:
    """The logins of one client, for all its connections, on every loop.

    Args:
        user: The user in the URL.
        password: The password there.
        source: Where they come from instead; None: the URL.
        needs_user: The store, if it has no login without a user; for a message.
        warnings: About a file with the password.
    """

    def __init__(
        self,
        user: str | None,
        password: Secret | None,
        source: Source | None = None,
        *,
        needs_user: object = None,
        warnings: tuple[Fact, ...] = (),
    ) -> None:
        self._needs_user = needs_user
        self.warnings = warnings
        self._fixed = Login(user, password)
        self._source = source
        self._kept: _Kept | None = None
        self._asking: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Login]] = WeakKeyDictionary()
        self._quotable: tuple[Secret, ...] = ()
        self._has_worked = False

    @property
    def is_fixed(self) -> bool:
        """Whether there is only one, that of the URL."""
        return self._source is None

    @property
    def source(self) -> str:
        """Where passwords come from, in words; empty: the URL."""
        return "" if self._source is None else self._source.name

    async def login(self) -> Login:
        """Return the login for a connection that is being made now.

        Raises:
            Unavailable, ConfigError: There is none.
        """
        if self._source is None:
            return self._fixed
        kept = self._kept  # a connection on another loop may be refused meanwhile
        if kept is not None and time.monotonic() < kept.until:
            return kept.login
        loop = asyncio.get_running_loop()
        asking = self._asking.get(loop)
        if asking is None or asking.done():
            asking = self._asking[loop] = loop.create_task(self._ask(self._source), name="tenure-credentials")
            asking.add_done_callback(_heard)
        if self._accepted() is not None:
            await asyncio.wait([asking], timeout=SLOW)
            if not asking.done() and (left := self._accepted()) is not None:
                return self._keep_on(left)
        return await asyncio.shield(asking)  # whoever gives up doesn't take it from the others

    def refused(self, login: Login) -> None:
        """Note that the server refuses *login*: the next connection asks for another one."""
        kept = self._kept
        if kept is not None and kept.login.is_same(login):
            self._kept = None

    def unanswered(self, within: float) -> Unavailable | None:
        """Return the error of who has waited for a connection so many seconds; None if no login is being asked for."""
        asking = self._asking.get(asyncio.get_running_loop())
        if asking is None or asking.done():
            return None
        return Unavailable(f"{self.source} gave no password within {within:.3g} s; it has {ASK_MAX:g} s for that")

    async def let_in(self, connect: Callable[[Login], Awaitable[T]], is_refused: Callable[[Exception], bool]) -> T:
        """Return the result of *connect* with the newest login; call it again if that is replaced just now.

        Args:
            connect: Makes a connection.
            is_refused: Whether its error says that the server refuses the login.
        """
        login = await self.login()
        try:
            return await connect(login)
        except Exception as error:
            if self._source is None or not is_refused(error):
                raise
            self.refused(login)
            newer = await self.login()
            if newer.is_same(login):
                raise
        return await connect(newer)

    async def _ask(self, source: Source) -> Login:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ASK_MAX):
                found = await source.ask()
        except TimeoutError:
            failure: TenureError = Unavailable(f"{source.name} gave no password within {ASK_MAX:g} s")
        except RuntimeError as error:  # the system gives no thread
            failure = Unavailable(f"{source.name} can't be asked now: {error}")
        except TenureError as error:
            failure = error
        else:
            self._note_quotable(found.secret)
            user = found.user or self._fixed.user
            if not user and self._needs_user is not None:
                raise self._lasting(
                    f"{source.name} gives a password without a user, and {self._needs_user} needs one; return "
                    "tenure.Credentials(password, user=…), or write the user before the @ of the URL"
                )
            self._has_worked = True
            lasts = math.inf if found.lasts is None else found.lasts
            login = Login(user, found.secret, asked_at + RENEWED_AT * lasts, asked_at + lasts)
            until = asked_at + source.keeps if found.lasts is None else login.renewed_at
            self._kept = _Kept(login, until) if until > asked_at else None
            return login
        if (left := self._accepted()) is not None:
            return self._keep_on(left)
        if isinstance(failure, Unavailable):
            raise failure
        raise self._lasting(str(failure)) from failure

    def _accepted(self) -> Login | None:
        """Return the login that is known to be accepted for some time yet, if there is one."""
        kept = self._kept
        return kept.login if kept is not None and time.monotonic() < kept.login.ends_at < math.inf else None

    def _keep_on(self, login: Login) -> Login:
        """Use *login* for a part of the time that it has, as there is no other one yet."""
        now = time.monotonic()
        again = now + TRIED_AGAIN * (login.ends_at - now)
        login = replace(login, renewed_at=again)
        self._kept = _Kept(login, again)
        return login

    def _note_quotable(self, secret: Secret) -> None:
        hide(secret)
        others = [one for one in self._quotable if one != secret]
        self._quotable = (secret, *others[: QUOTABLE - 1])

    def _lasting(self, text: str) -> TenureError:
        return lasting(text, worked=self._has_worked)


def _heard(asking: asyncio.Task[Login]) -> None:
    """Keep asyncio from logging an error that nobody has waited for."""
    if not asking.cancelled():
        asking.exception()


def names_source(options: PasswordOptions, given: Source | None) -> bool:
    """Return whether the password comes from elsewhere than the URL, which may have a user alone then."""
    return given is not None or options.password_file is not None or options.password_command is not None


def logins_of(
    store: object,
    options: PasswordOptions,
    given: Source | None,
    *,
    user: str | None,
    password: Secret | None,
    needs_user: bool = False,
    login_file: str = "",
) -> Logins:
    """Return the logins that a URL and its *options* name, or that are *given* by the caller.

    Args:
        store: The store, for messages.
        options: What the URL says of the password.
        given: The caller's own.
        user: The user that the URL names.
        password: The password in it.
        needs_user: Whether the store has no login without a user.
        login_file: The option that names a file with the whole login, if the URL has one.

    Raises:
        ConfigError: There are two of them, a file can't be read, or a command can't be one.
    """
    named = {
        "a password": password or None,
        "password_file=": options.password_file,
        "password_command=": options.password_command,
        "credentials=": given,
    }
    present = [login_file] if login_file and names_source(options, given) else []
    present += [name for name, value in named.items() if value is not None]
    if len(present) > 1:
        raise ConfigError(f"{store} is given {' and '.join(present)}; leave out all but one")
    warnings: tuple[Fact, ...] = ()
    if options.password_file is not None:
        warnings = require_readable(store, password_file=options.password_file)
        given = PasswordFile(options.password_file)
    elif options.password_command is not None:
        given = PasswordCommand.parse(options.password_command, store)
    return Logins(user, password, given, needs_user=store if needs_user else None, warnings=warnings)


# --- where they come from ----------------------------------------------------------------------------------------


class PasswordFile:
    """A file with a password, which others replace."""

    keeps = 0.0

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The option, as the URL has it."""
        return f"password_file={self._path}"

    async def ask(self) -> Credentials:
        """Return the password that is in the file now."""
        try:
            content = await in_thread("tenure-password", partial(read_file, self._path))
        except OSError as error:
            raise ConfigError(f"{self.name} can't be read: {error.strerror}") from None
        return _password_in(content, self.name)


class PasswordCommand:
    """A command that prints a password."""

    keeps = COMMAND_KEPT

    def __init__(self, argv: tuple[str, ...]) -> None:
        self._argv = argv
        # Without its arguments, which may be secret; and what is no command may be the password itself.
        shown = argv[0] if shutil.which(argv[0]) else HIDDEN if "=" in argv[0] else path_shown(argv[0])
        self.name: str = f"the password command {shown!r}"

    @classmethod
    def parse(cls, written: Secret, store: object) -> PasswordCommand:
        """Return the command that is *written* in the option, split as a shell does it.

        Raises:
            ConfigError: It is none.
        """
        try:
            argv = tuple(shlex.split(written.reveal()))
        except ValueError as error:
            raise ConfigError(f"password_command= of {store} can't be split into words: {error}") from None
        if not argv:
            raise ConfigError(f"password_command= of {store} is empty; name a command that prints the password")
        return cls(argv)

    async def ask(self) -> Credentials:
        """Return what the command prints."""
        return _password_in(await output_of(self._argv, self.name, within=ASK_MAX), self.name)


class Given:
    """A function of the caller.

    Args:
        ask: The function.
        loop: The loop that has opened the backend, on which its coroutines run; None: each runs on a loop of its own,
            in the thread that has called the function.
    """

    keeps = 0.0
    name = "credentials="

    def __init__(self, ask: AskCredentials, loop: asyncio.AbstractEventLoop | None) -> None:
        self._ask = ask
        self._loop = loop

    async def ask(self) -> Credentials:
        """Return what the function returns."""
        answer = await in_thread("tenure-credentials", self._call)
        if self._loop is not None and inspect.isawaitable(answer):
            answer = await self._on(self._loop, answer)
        if isinstance(answer, (str, Secret)):
            return Credentials(answer)
        if not isinstance(answer, Credentials):
            raise ConfigError(
                f"credentials= must return tenure.Credentials, or the password as a str, not {type(answer).__name__}"
            )
        return answer

    def _call(self) -> Answer | Awaitable[Answer]:
        try:
            answer = self._ask()
        except TenureError:
            raise
        except BaseException as error:  # also SystemExit, which would end the loop that asks
            raise self._failure(error) from error
        return asyncio.run(self._awaited(answer)) if self._loop is None and inspect.isawaitable(answer) else answer

    async def _awaited(self, answer: Awaitable[Answer]) -> Answer:
        try:
            return await answer
        except (TenureError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            if is_cancelled():
                raise
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> Unavailable:
        """Return an error of the caller's own: of a cloud that gives no token now, or a bug."""
        return Unavailable(f"{self.name} failed: {redacted(in_words(error))}")

    async def _on(self, loop: asyncio.AbstractEventLoop, answer: Awaitable[Answer]) -> Answer:
        if loop is asyncio.get_running_loop():
            return await self._awaited(answer)
        over = f"the event loop that has opened the backend is over, so {self.name} can't be asked"
        if not loop.is_running():
            if inspect.iscoroutine(answer):
                answer.close()
            raise Unavailable(over)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._awaited(answer), loop))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise Unavailable(over) from None


WITHOUT_PASSWORDS: Mapping[str, str] = MappingProxyType(
    {
        "azure": "without a key or a signature, it logs in by Entra ID, and renews that by itself",
        "azurite": "it has the key that everybody knows",
        "kubernetes": "it reads its token again by itself, and runs the credential command of a kubeconfig",
        "memory": "it has no login",
        "peers": "its members know each other by key_file=",
        "servicebus": "without a signature, it logs in by Entra ID, and renews that by itself",
        "sqlite": "it has no login",
    }
)
"""The schemes whose stores have no passwords, and what they have instead."""


def require_credentials(given: object, url: Url) -> None:
    """Refuse what can't be asked for credentials, and credentials for a store that takes none.

    Raises:
        ConfigError: It is so.
    """
    if (instead := WITHOUT_PASSWORDS.get(url.scheme)) is not None:
        raise ConfigError(f"{url} takes no credentials=: {instead}; leave them out")
    if not callable(given):
        raise ConfigError(
            f"credentials= must be a function that returns tenure.Credentials, or a password, not "
            f"{'Credentials' if isinstance(given, Credentials) else type(given).__name__}; a password that stays the "
            "same belongs into the URL"
        )


def _password_in(content: bytes, name: str) -> Credentials:
    """Return the only line of *content*, which is from the source with that *name*."""
    try:
        text = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} has what is no text in UTF-8, where a password is expected") from None
    if not text:
        raise ConfigError(f"{name} has no password: it is empty")
    if len(content) > PASSWORD_BYTES:
        raise ConfigError(f"{name} has {len(content):,} bytes, and a password has at most {PASSWORD_BYTES:,}")
    if any(ord(one) < 32 or ord(one) == 127 for one in text):
        raise ConfigError(f"{name} has several lines, or control characters, where nothing but a password is expected")
    return Credentials(text)
