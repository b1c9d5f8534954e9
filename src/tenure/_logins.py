"""What a store lets this client in by, if the URL has no password: it is asked for whenever a connection is made.

House rules:

- A password is replaced while connections are being made. So one that is refused is asked for once more, at once; the
  refusal counts if the answer is the same.
- Connections that are made together ask once. Between them, only what says how long it lasts is kept, and the answer of
  a command, as a command is slow.
- What lasts for a known time is asked for again at a share of it, before anybody needs it. If the source fails then, or
  is slow, or the store doesn't accept the new one yet, what there is goes on to its end.
- A connection that works is given up only for a login that lasts longer: what a store thinks of the old one when it has
  ended is for the store to say.
- The caller's own code never runs on the renewal thread: a function runs in a thread, and what it awaits on the loop
  that has opened the backend; or there, if that is the loop of this thread, as calls that block have opened it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import shlex
import shutil
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from tenure._credential_command import output_of
from tenure._credentials import PASSWORD_MAX, AskCredentials, Credentials
from tenure._opened import Fact
from tenure._option_files import exists, read_file, require_readable
from tenure._redaction import redact, redacted
from tenure._runtime.tasks import is_cancelled
from tenure._runtime.threads import in_thread
from tenure._secret import HIDDEN, Secret, hide
from tenure._tls_failures import lasting
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable, in_words

T = TypeVar("T")
Answer: TypeAlias = Credentials | str | Secret
"""What a function of the caller may return."""

RENEWED_AT = 0.75
"""The share of its time at which a login is replaced."""
TRIED_AGAIN, TRIED_AGAIN_MIN = 0.1, 1.0
"""The share of the time that is left then, after which it is tried again if that has failed; and the least seconds."""
SAME_END = 1.0
"""Seconds by which two ends of one token may differ: they are calculated, by clocks of whole seconds."""
UNCLAIMED = 10.0
"""Seconds for which an answer is kept that came when nobody waited for it any more."""
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


Check: TypeAlias = Callable[[Login, str], Sequence[Secret]]
"""Returns the parts of a login that servers may quote; raises ``ConfigError`` if it is none of this store's."""


class _Kept(NamedTuple):
    """A login for the connections to come."""

    login: Login
    until: float
    """When it is asked for again."""


@dataclass
class _Asking:
    """A question that is asked now, for all who wait for its answer."""

    task: asyncio.Task[Login]
    begun: float
    waiting: int = 0


class Logins:
    """The logins of one client, for all its connections, on every loop.

    Args:
        user: The user in the URL.
        password: The password there.
        source: Where they come from instead; None: the URL.
        needs_user: The store, if it has no login without a user; for a message.
        check: Called with each login, and the name of its source.
        warnings: About a file with the password.
    """

    def __init__(
        self,
        user: str | None,
        password: Secret | None,
        source: Source | None = None,
        *,
        needs_user: object = None,
        check: Check | None = None,
        warnings: tuple[Fact, ...] = (),
    ) -> None:
        self._needs_user = needs_user
        self._check = check
        self.warnings = warnings
        self._fixed = Login(user, password)
        self._source = source
        self._kept: _Kept | None = None
        self._before: Login | None = None
        """The one before that, while the store should still accept it."""
        self._asking: WeakKeyDictionary[asyncio.AbstractEventLoop, _Asking] = WeakKeyDictionary()
        self._refused_at = -math.inf
        self._is_used = False
        """Whether a connection was made since the last question."""
        self._quotable: tuple[tuple[Secret, ...], ...] = ()
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
        if kept is not None and time.monotonic() < min(kept.until, kept.login.ends_at):
            self._is_used = True
            return kept.login
        asking = self._begin(self._source)
        self._is_used = True
        asking.waiting += 1
        try:
            if self._accepted() is not None:
                await asyncio.wait([asking.task], timeout=SLOW)
                if not asking.task.done() and (left := self._accepted()) is not None:
                    return left
            return await asyncio.shield(asking.task)  # whoever gives up doesn't take it from the others
        finally:
            asking.waiting -= 1

    def refused(self, login: Login) -> None:
        """Note that the server refuses *login*: the next connection has another one.

        It is the one before if that has not ended: a store may accept a new one some time after it was given out.
        """
        self._refused_at = now = time.monotonic()
        kept, before, self._before = self._kept, self._before, None
        if kept is None or not kept.login.is_same(login):
            return
        self._kept = None
        if before is not None and before.ends_at > now and not before.is_same(login):
            self._kept = _Kept(before, _again(before, now))

    def replaces(self, login: Login) -> bool:
        """Return whether a connection that was made with *login* should be replaced: by one that lasts longer.

        If it is time for one, and there is none, the source is asked beside the requests, which go on.
        """
        if self._source is None or (now := time.monotonic()) < login.renewed_at:
            return False
        kept = self._kept
        if kept is None or now >= kept.until:
            asking = self._asking.get(asyncio.get_running_loop())
            if asking is None or now - asking.begun >= TRIED_AGAIN_MIN:
                self._begin(self._source)
        return kept is not None and kept.login.ends_at > max(now, login.ends_at + SAME_END)

    def unanswered(self, within: float) -> Unavailable | None:
        """Return the error of who has waited for a connection so many seconds; None if no login is being asked for."""
        asking = self._asking.get(asyncio.get_running_loop())
        if asking is None or asking.task.done():
            return None
        return Unavailable(
            f"{self.source} gave no password within {within:.3g} s; if it needs longer, raise timeout= in the URL"
        )

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
        try:
            return await connect(newer)
        except Exception as error:
            if is_refused(error):
                self.refused(newer)
            raise

    def _begin(self, source: Source) -> _Asking:
        """Ask *source*, or wait with those who do; but not for an answer from before a refusal."""
        loop = asyncio.get_running_loop()
        asking = self._asking.get(loop)
        if asking is None or asking.task.done() or asking.begun < self._refused_at:
            self._is_used = False
            task = loop.create_task(self._ask(source), name="tenure-credentials")
            task.add_done_callback(_heard)
            asking = self._asking[loop] = _Asking(task, time.monotonic())
        return asking

    def _ask_in_time(self, source: Source, at: float) -> None:
        """Ask again when the login that is kept should be replaced, if a connection was made with it meanwhile.

        So a source may be slow: nobody waits for it. One that nobody uses any more, as after a close, is not asked.
        """
        known = weakref.ref(self)

        def ask() -> None:
            logins = known()
            if logins is not None and logins._is_used and logins._kept is not None and logins._kept.until <= at:
                logins._begin(source)

        asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), ask)

    async def _ask(self, source: Source) -> Login:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ASK_MAX):
                found = await source.ask()
            user = found.user or self._fixed.user
            parts = () if self._check is None else self._check(Login(user, found.secret), source.name)
        except TimeoutError:
            failure: TenureError = Unavailable(f"{source.name} gave no password within {ASK_MAX:g} s")
        except RuntimeError as error:  # the system gives no thread
            failure = Unavailable(f"{source.name} can't be asked now: {error}")
        except TenureError as error:
            failure = error
        else:
            self._note_quotable(found.secret, parts)
            if not user and self._needs_user is not None:
                returned = "return tenure.Credentials(password, user=…), or " if isinstance(source, Given) else ""
                raise self._lasting(
                    f"{source.name} gives a password without a user, and {self._needs_user} needs one; {returned}write "
                    "the user before the @ of the URL"
                )
            self._has_worked = True
            lasts = math.inf if found.lasts is None else found.lasts
            login = Login(user, found.secret, asked_at + RENEWED_AT * lasts, asked_at + lasts)
            self._note(login, source, asked_at)
            return login
        if (left := self._accepted()) is not None:
            again = _again(left, time.monotonic())
            left = replace(left, renewed_at=again)
            self._kept = _Kept(left, again)
            self._is_used = True
            self._ask_in_time(source, again)
            return left
        if isinstance(failure, Unavailable):
            raise failure
        raise self._lasting(str(failure)) from failure

    def _note(self, login: Login, source: Source, asked_at: float) -> None:
        """Keep a *login* for the connections to come, if it is not only for those that wait for it."""
        if asked_at < self._refused_at:  # it may be the one that was refused
            return
        self._before, self._kept = self._accepted(), None
        if login.ends_at < math.inf:
            self._kept = _Kept(login, login.renewed_at)
            self._ask_in_time(source, login.renewed_at)
        elif source.keeps:
            self._kept = _Kept(login, asked_at + source.keeps)
        elif (asking := self._asking.get(asyncio.get_running_loop())) is not None and not asking.waiting:
            self._kept = _Kept(login, time.monotonic() + UNCLAIMED)

    def _accepted(self) -> Login | None:
        """Return the login that is known to be accepted for some time yet, if there is one."""
        kept = self._kept
        return kept.login if kept is not None and time.monotonic() < kept.login.ends_at < math.inf else None

    def _note_quotable(self, secret: Secret, parts: Sequence[Secret]) -> None:
        hide(secret, *parts)
        others = [one for one in self._quotable if one[0] != secret]
        self._quotable = ((secret, *parts), *others[: QUOTABLE - 1])

    def _lasting(self, text: str) -> TenureError:
        return lasting(text, worked=self._has_worked)


class HeldLogin:
    """One login for all requests of a loop, which have no connection that it could belong to.

    It is used until it is refused, or one is there that lasts longer.
    """

    def __init__(self, logins: Logins) -> None:
        self._logins = logins
        self._login: Login | None = None
        self._asking: asyncio.Future[Login] | None = None
        """What those wait for that need another one; until its answer is noted."""
        self._gave_up: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    async def now(self) -> Login:
        """Return the login for a request that is sent now.

        Raises:
            Unavailable, ConfigError: There is none.
        """
        held = self._login
        if held is not None and not self._logins.replaces(held):
            return held
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._logins.login())
            self._asking.add_done_callback(partial(self._answered, held))
        try:
            return await asyncio.shield(self._asking)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                self._gave_up.add(task)
            raise

    async def after(self, refused: Login) -> Login | None:
        """Return the login for a request that was *refused* with this one; None if there is no other."""
        if self._login is refused:  # else another request has asked for the next one
            self._logins.refused(refused)
            self._login = self._asking = None  # a question from before may be answered by the same
        newer = await self.now()
        return None if newer.is_same(refused) else newer

    def has_kept_waiting(self) -> bool:
        """Return whether this task was cancelled while it waited for a login; only once."""
        task = asyncio.current_task()
        found = task in self._gave_up
        if task is not None:
            self._gave_up.discard(task)
        return found

    def _answered(self, before: Login | None, asking: asyncio.Future[Login]) -> None:
        is_wanted = self._asking is asking
        if is_wanted:
            self._asking = None
        if not asking.cancelled() and asking.exception() is None and is_wanted and self._login is before:
            self._login = asking.result()


def _again(login: Login, now: float) -> float:
    """Return when to ask for another login than this one, whose end is near, after there was none."""
    return now + max(TRIED_AGAIN_MIN, TRIED_AGAIN * (login.ends_at - now))


def _heard(asking: asyncio.Task[Login]) -> None:
    """Keep asyncio from logging an error that nobody has waited for."""
    if not asking.cancelled():
        asking.exception()


def names_source(options: PasswordOptions, given: Source | None) -> bool:
    """Return whether the password comes from elsewhere than the URL, which may have a user alone then."""
    return given is not None or options.password_file is not None or options.password_command is not None


def names_only_source(url: Url, options: PasswordOptions, given: Source | None, other: str) -> bool:
    """Return :func:`names_source`.

    Args:
        url: The store, for the message.
        options: What the URL says of the password.
        given: The caller's own.
        other: Another login that the URL names; empty: none.

    Raises:
        ConfigError: There are both.
    """
    has_source = names_source(options, given)
    if has_source and other:
        raise ConfigError(
            f"{url} is given {other} beside credentials=, password_file= or password_command=; leave out all but one"
        )
    return has_source


def logins_of(
    store: object,
    options: PasswordOptions,
    given: Source | None,
    *,
    user: str | None,
    password: Secret | None,
    needs_user: bool = False,
    login_file: str = "",
    check: Check | None = None,
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
        check: Looks at each login that is not of the URL; see :class:`Logins`.

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
    return Logins(user, password, given, needs_user=store if needs_user else None, check=check, warnings=warnings)


# --- where they come from ----------------------------------------------------------------------------------------


class PasswordFile:
    """A file with a password, which others replace."""

    keeps = 0.0

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)  # a daemon changes its folder
        self.name: str = f"password_file={_shown(path, is_there=exists(path))}"

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
        program, *arguments = argv
        self._argv = (os.path.abspath(program) if os.sep in program else program, *arguments)
        # Without its arguments, which may be secret.
        shown = _shown(argv[0], is_there=shutil.which(argv[0]) is not None)
        self.name: str = f"the password command {shown!r}"

    @classmethod
    def parse(cls, written: Secret, store: object) -> PasswordCommand:
        """Return the command that is *written* in the option, split as a shell does it.

        Raises:
            ConfigError: It is none.
        """
        text = written.reveal()
        try:
            argv = tuple(shlex.split(text))
            parts = list(shlex.shlex(text, punctuation_chars=True))  # which keeps the quotes
        except ValueError as error:
            raise ConfigError(f"password_command= of {store} can't be split into words: {error}") from None
        if not argv:
            raise ConfigError(f"password_command= of {store} is empty; name a command that prints the password")
        if any(set(part) <= set("();<>|&") for part in parts):
            raise ConfigError(
                f"password_command= of {store} has a sign of the shell, and is run without one; write sh -c '…', or "
                "quote it"
            )
        return cls(argv)

    async def ask(self) -> Credentials:
        """Return what the command prints."""
        written = await output_of(
            self._argv,
            self.name,
            within=ASK_MAX,
            install="name it as this process finds it; no shell replaces a ~ or a $",
            remedy="run it by hand to see what it needs",
        )
        return _password_in(written, self.name)


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
        except (TenureError, GeneratorExit):
            raise
        except BaseException as error:
            is_of_caller = self._loop is not None and isinstance(error, KeyboardInterrupt)
            if is_cancelled() or is_of_caller:
                raise
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> Unavailable:
        """Return an error of the caller's own: of a cloud that gives no token now, or a bug."""
        failure = Unavailable(f"{self.name} failed: {redacted(in_words(error))}")
        redact(error)
        return failure

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
        "kubernetes": "it reads its token again by itself, and runs the credential command of a kubeconfig",
        "memory": "it has no login",
        "peers": "its members know each other by key_file=",
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
    try:
        signature = inspect.signature(given)
    except ValueError:  # some, of C, show none
        return
    try:
        signature.bind()
    except TypeError:
        raise ConfigError(
            f"credentials= is called without arguments, and {getattr(given, '__name__', 'this function')} needs some; "
            "give for example a lambda"
        ) from None


def _shown(written: str, *, is_there: bool) -> str:
    """Return the name of a file or a command for a message, unless it may be the password, in place of that."""
    return written if is_there or (os.sep in written and "=" not in written) else HIDDEN


def _password_in(content: bytes, name: str) -> Credentials:
    """Return the only line of *content*, which is from the source with that *name*."""
    if len(content) > PASSWORD_MAX:
        raise ConfigError(f"{name} has {len(content):,} bytes, and a password has at most {PASSWORD_MAX:,}")
    try:
        text = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} has what is no text in UTF-8, where a password is expected") from None
    if not text:
        raise ConfigError(f"{name} has no password: it is empty")
    if any(ord(one) < 32 or ord(one) == 127 for one in text):
        raise ConfigError(f"{name} has several lines, or control characters, where nothing but a password is expected")
    return Credentials(text)
