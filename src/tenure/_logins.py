"""What a store lets this client in by, if the URL has no password: it is asked for whenever a connection is made.

House rules:

- A password is replaced while connections are being made. So one that is refused is asked for once more, at once; the
  refusal counts if the answer is the same.
- Connections that are made together ask once. Between them, only what says how long it lasts is kept, and the answer of
  a command, as a command is slow.
- What lasts for a known time is replaced at a share of it; if the source fails then, or is slow, what there is goes on
  to its end.
- The caller's own code never runs on the renewal thread: a function runs in a thread, and what it awaits on the loop
  that has opened the backend.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import shlex
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from tenure._credential_command import output_of
from tenure._credentials import AskCredentials, Credentials
from tenure._opened import Fact
from tenure._option_files import read_file, require_readable
from tenure._runtime.threads import in_thread
from tenure._secret import Secret, hide
from tenure._tls_failures import lasting
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

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
        self._kept: Login | None = None
        self._asking: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Login]] = WeakKeyDictionary()
        self._quotable: deque[Secret] = deque(maxlen=QUOTABLE)
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
        if self._kept is not None and time.monotonic() < self._kept.renewed_at:
            return self._kept
        loop = asyncio.get_running_loop()
        asking = self._asking.get(loop)
        if asking is None or asking.done():
            asking = self._asking[loop] = loop.create_task(self._ask(self._source), name="tenure-credentials")
            asking.add_done_callback(_heard)
        if self._goes_on:
            await asyncio.wait([asking], timeout=SLOW)
            if not asking.done() and self._kept is not None and self._goes_on:
                return self._kept_for_now(self._kept)
        return await asyncio.shield(asking)  # whoever gives up doesn't take it from the others

    def refused(self, login: Login) -> None:
        """Note that the server refuses *login*: the next connection asks for another one."""
        if self._kept is not None and self._kept.is_same(login):
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
        except TenureError as error:
            failure = error
        else:
            self._has_worked = True
            secret = found.secret
            hide(secret)
            self._quotable.append(secret)
            user = found.user or self._fixed.user
            if not user and self._needs_user is not None:
                raise ConfigError(
                    f"{source.name} gives a password without a user, and {self._needs_user} needs one; return "
                    "tenure.Credentials(password, user=…), or write the user before the @ of the URL"
                )
            lasts = math.inf if found.lasts is None else found.lasts
            until = RENEWED_AT * lasts if found.lasts is not None else source.keeps
            login = Login(user, secret, asked_at + RENEWED_AT * lasts, asked_at + lasts)
            self._kept = Login(user, secret, asked_at + until, asked_at + lasts) if until else None
            return login
        if self._kept is None or not self._goes_on:
            if isinstance(failure, Unavailable):
                raise failure
            raise lasting(str(failure), worked=self._has_worked) from failure
        return self._kept_for_now(self._kept)

    @property
    def _goes_on(self) -> bool:
        """Whether there is a login that is known to be accepted for some time yet."""
        return self._kept is not None and time.monotonic() < self._kept.ends_at < math.inf

    def _kept_for_now(self, kept: Login) -> Login:
        now = time.monotonic()
        self._kept = Login(kept.user, kept.password, now + TRIED_AGAIN * (kept.ends_at - now), kept.ends_at)
        return self._kept


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
) -> Logins:
    """Return the logins that a URL and its *options* name, or that are *given* by the caller.

    Args:
        store: The store, for messages.
        options: What the URL says of the password.
        given: The caller's own.
        user: The user that the URL names.
        password: The password in it.
        needs_user: Whether the store has no login without a user.

    Raises:
        ConfigError: There are two passwords, a file can't be read, or a command can't be one.
    """
    named = {
        "a password": password or None,
        "password_file=": options.password_file,
        "password_command=": options.password_command,
        "credentials=": given,
    }
    present = [name for name, value in named.items() if value is not None]
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

    @property
    def name(self) -> str:
        """The command, without its arguments, which may be secret."""
        return f"the password command {self._argv[0]!r}"

    async def ask(self) -> Credentials:
        """Return what the command prints."""
        return _password_in(await output_of(self._argv, self.name, within=ASK_MAX), self.name)


class Given:
    """A function of the caller.

    Args:
        ask: The function.
        loop: The loop that has opened the backend, on which its coroutines run.
    """

    keeps = 0.0
    name = "credentials="

    def __init__(self, ask: AskCredentials, loop: asyncio.AbstractEventLoop) -> None:
        self._ask = ask
        self._loop = loop

    async def ask(self) -> Credentials:
        """Return what the function returns."""
        try:
            answer = await in_thread("tenure-credentials", self._ask)
            if inspect.isawaitable(answer):
                answer = await self._await(answer)
        except TenureError:
            raise
        except Exception as error:  # the caller's: a cloud that gives no token now, or a bug
            raise Unavailable(f"{self.name} failed: {type(error).__name__}: {error}") from error
        if isinstance(answer, (str, Secret)):
            return Credentials(answer)
        if not isinstance(answer, Credentials):
            raise ConfigError(
                f"credentials= must return tenure.Credentials, or the password as a str, not {type(answer).__name__}"
            )
        return answer

    async def _await(self, answer: Awaitable[Answer]) -> Answer:
        async def run() -> Answer:
            return await answer

        if self._loop is asyncio.get_running_loop():
            return await run()
        if not self._loop.is_running():
            if inspect.iscoroutine(answer):
                answer.close()
            raise Unavailable("the event loop that has opened the backend is over, so credentials= can't be asked")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))


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
