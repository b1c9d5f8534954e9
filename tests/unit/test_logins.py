"""The logins of a client: whom it asks for them, how often and where; and what it does with each answer."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import tenure
import tenure.sync
from tenure import Credentials, Secret, _credential_command, _logins, _registry
from tenure._credentials import PASSWORD_MAX
from tenure._logins import (
    COMMAND_KEPT,
    WITHOUT_PASSWORDS,
    Given,
    Login,
    Logins,
    PasswordCommand,
    PasswordFile,
    PasswordOptions,
    Source,
    logins_of,
    names_source,
    require_credentials,
)
from tenure._redaction import redacted
from tenure._runtime.loop_thread import LoopThread
from tenure._runtime.renewal_thread import RenewalThread
from tenure._url import Url
from tenure.errors import BackendNotInstalled, ConfigError, TenureError, Unavailable
from tests.absent import skip_or_fail
from tests.durations import until

HUSH = "hush7hush"
"""A password that nothing may show."""
is_posix = pytest.mark.skipif(
    not hasattr(os, "killpg"), reason="Windows has no sh, no modes and no groups of processes"
)


class Refusal(Exception):
    """A server refuses the login."""


def is_refused(error: Exception) -> bool:
    return isinstance(error, Refusal)


class Fake:
    """A source that gives these answers, or raises these errors, in their order, and the last one from then on.

    Args:
        answers: What it gives; a number is of seconds that pass on the clock first.
        keeps: For how many seconds an answer is used again, if that doesn't say.
    """

    name = "the fake"

    def __init__(self, *answers: Credentials | str | Exception, keeps: float = 0.0) -> None:
        self.answers = list(answers)
        self.keeps = keeps
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.before: Callable[[], object] = lambda: None

    async def ask(self) -> Credentials:
        self.asked += 1
        await self.may_answer.wait()
        self.before()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return Credentials(answer) if isinstance(answer, str) else answer


class Now:
    """The clock of the logins, which stands until a test turns it."""

    seconds = 1_000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    clock = Now()
    monkeypatch.setattr(_logins, "time", clock)
    return clock


def of(source: Source | None, user: str | None = "ann", **more: Any) -> Logins:
    return Logins(user, None, source, **more)


async def password(logins: Logins) -> str:
    login = await logins.login()
    assert login.password is not None
    return login.password.reveal()


# --- asked together, and again ---


async def test_without_a_source_there_is_one_login() -> None:
    logins = Logins("ann", Secret(HUSH))
    assert await logins.login() == Login("ann", Secret(HUSH))
    assert (logins.is_fixed, logins.source, logins.unanswered(1.0)) == (True, "", None)
    tried: list[Login] = []

    async def connect(login: Login) -> None:
        tried.append(login)
        raise Refusal

    with pytest.raises(Refusal):
        await logins.let_in(connect, is_refused)
    assert tried == [Login("ann", Secret(HUSH))]


async def test_each_connection_gets_the_newest_password() -> None:
    source = Fake("first", "second", "third")
    logins = of(source)
    assert [await password(logins) for _ in range(3)] == ["first", "second", "third"]
    assert (logins.is_fixed, logins.source) == (False, "the fake")


async def test_connections_that_are_made_together_ask_once() -> None:
    source = Fake("first", "second")
    logins = of(source)
    source.may_answer.clear()
    together = [asyncio.create_task(password(logins)) for _ in range(5)]
    await until(lambda: source.asked)
    together.append(asyncio.create_task(password(logins)))
    await asyncio.sleep(0)
    source.may_answer.set()
    assert await asyncio.gather(*together) == ["first"] * 6
    assert source.asked == 1
    assert await password(logins) == "second"


async def test_a_failure_is_told_to_all_who_wait_for_it() -> None:
    source = Fake(Unavailable("no token now"), "second")
    logins = of(source)
    found = await asyncio.gather(*(logins.login() for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in found] == ["no token now"] * 3
    assert source.asked == 1
    assert await password(logins) == "second"


async def test_who_gives_up_leaves_the_answer_to_the_others() -> None:
    source = Fake("first")
    logins = of(source)
    source.may_answer.clear()
    first, second = (asyncio.create_task(password(logins)) for _ in range(2))
    await until(lambda: source.asked)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    source.may_answer.set()
    assert await second == "first"
    assert source.asked == 1


async def test_a_failure_that_nobody_waits_for_any_more_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    source = Fake(Unavailable("no token now"))
    logins = of(source)
    source.may_answer.clear()
    waiting = asyncio.create_task(logins.login())
    await until(lambda: source.asked)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    [asking] = [task for task in asyncio.all_tasks() if task.get_name() == "tenure-credentials"]
    source.may_answer.set()
    await asyncio.wait([asking])
    del asking, waiting
    assert not caplog.records


async def test_each_loop_asks_for_itself() -> None:
    source = Fake("first", "second")
    logins = of(source)
    assert await password(logins) == "first"
    assert await asyncio.to_thread(lambda: asyncio.run(password(logins))) == "second"


async def test_a_source_that_is_waited_for_is_named() -> None:
    source = Fake("first")
    logins = of(source)
    source.may_answer.clear()
    assert logins.unanswered(5.0) is None
    waiting = asyncio.create_task(logins.login())
    await until(lambda: source.asked)
    assert (
        str(logins.unanswered(5.0))
        == "the fake gave no password within 5 s; if it needs longer, raise timeout= in the URL"
    )
    source.may_answer.set()
    await waiting
    assert logins.unanswered(5.0) is None


# --- refused ---


@dataclass
class Server:
    """Lets in who shows its password, and notes who tries."""

    password: str
    tried: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    async def connect(self, login: Login) -> str:
        assert login.password is not None
        self.tried.append(login.password.reveal())
        if self.tried[-1] != self.password:
            self.refusals.append(Refusal(len(self.refusals)))
            raise self.refusals[-1]
        return "connected"


@pytest.mark.parametrize("lasts", [None, 3_600.0])
async def test_a_login_that_is_refused_is_asked_for_once_more(lasts: float | None) -> None:
    source, server = Fake(Credentials("old", lasts=lasts), Credentials("new", lasts=lasts)), Server("new")
    assert await of(source).let_in(server.connect, is_refused) == "connected"
    assert (server.tried, source.asked) == (["old", "new"], 2)


@pytest.mark.parametrize("keeps", [0.0, COMMAND_KEPT])
async def test_the_refusal_counts_if_the_answer_is_the_same(keeps: float) -> None:
    source, server = Fake("old", keeps=keeps), Server("new")
    with pytest.raises(Refusal) as refused:
        await of(source).let_in(server.connect, is_refused)
    assert refused.value is server.refusals[0]
    assert (server.tried, source.asked) == (["old"], 2)


async def test_a_second_login_that_is_refused_is_not_asked_for_again() -> None:
    source, server = Fake("old", "older", "new"), Server("new")
    with pytest.raises(Refusal) as refused:
        await of(source).let_in(server.connect, is_refused)
    assert refused.value is server.refusals[1]
    assert (server.tried, source.asked) == (["old", "older"], 2)


async def test_another_user_with_the_same_password_is_another_login() -> None:
    source = Fake(Credentials("same", user="first"), Credentials("same", user="second"))
    users: list[str | None] = []

    async def connect(login: Login) -> None:
        users.append(login.user)
        if len(users) == 1:
            raise Refusal

    await of(source).let_in(connect, is_refused)
    assert users == ["first", "second"]


async def test_another_failure_of_a_connection_asks_for_nothing() -> None:
    source = Fake("old", "new")

    async def connect(login: Login) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await of(source).let_in(connect, is_refused)
    assert source.asked == 1


async def test_a_source_that_fails_the_second_time_is_told() -> None:
    source, server = Fake("old", Unavailable("no token now")), Server("new")
    with pytest.raises(Unavailable, match="no token now"):
        await of(source).let_in(server.connect, is_refused)
    assert server.tried == ["old"]


async def test_a_late_refusal_does_not_discard_the_login_that_has_come_since() -> None:
    source = Fake(Credentials("old", lasts=3_600.0), Credentials("new", lasts=3_600.0))
    logins = of(source)
    old = await logins.login()
    logins.refused(old)
    new = await logins.login()
    logins.refused(old)
    assert await logins.login() is new
    assert source.asked == 2


# --- kept ---


async def test_a_login_is_replaced_at_three_quarters_of_its_time(now: Now) -> None:
    """Its time is counted from the question: the answer may have taken a while."""
    source = Fake(Credentials("first", lasts=100.0), Credentials("second", lasts=100.0))
    source.before = lambda: setattr(now, "seconds", now.seconds + 10.0)
    logins = of(source)
    asked_at = now.seconds
    first = await logins.login()
    assert (first.renewed_at, first.ends_at) == (asked_at + 75.0, asked_at + 100.0)
    now.seconds = asked_at + 74.9
    assert await logins.login() is first
    now.seconds = asked_at + 75.0
    assert await password(logins) == "second"
    assert source.asked == 2


async def test_if_the_source_fails_the_login_is_used_to_its_end(now: Now) -> None:
    source = Fake(Credentials("first", lasts=100.0), ConfigError("can't be read"))
    logins = of(source)
    begin = now.seconds
    await logins.login()
    now.seconds = begin + 80.0
    kept = await logins.login()
    assert (kept.password, kept.ends_at, kept.renewed_at) == (Secret("first"), begin + 100.0, begin + 82.0)
    now.seconds = begin + 81.9
    await logins.login()
    assert source.asked == 2
    now.seconds = begin + 82.0
    await logins.login()
    assert source.asked == 3
    now.seconds = begin + 99.9
    assert await password(logins) == "first"
    now.seconds = begin + 100.0
    with pytest.raises(Unavailable, match=r"can't be read \(it worked before, so tenure tries again\)"):
        await logins.login()
    source.answers = [Credentials("second", lasts=100.0)]
    assert await password(logins) == "second"


async def test_a_login_is_asked_for_before_anybody_needs_it(now: Now, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a source may be slow. Who uses it no more, as after a close, doesn't ask."""
    timers, loop = list[Callable[[], None]](), asyncio.get_running_loop()
    usual: Any = loop.call_later

    def call_later(delay: float, call: Any, *given: Any, **named: Any) -> Any:
        if "_ask_in_time" not in getattr(call, "__qualname__", ""):
            return usual(delay, call, *given, **named)
        return timers.append(call)

    monkeypatch.setattr(loop, "call_later", call_later)
    source = Fake(*(Credentials(one, lasts=100.0) for one in ("first", "second", "third")))
    logins = of(source)
    first = await logins.login()
    now.seconds += 75.0
    assert not logins.replaces(first)
    timers.pop()()
    await until(lambda: logins.replaces(first))
    assert source.asked == 2
    second = await logins.login()
    assert (second.password, source.asked) == (Secret("second"), 2)
    assert not logins.replaces(second)
    now.seconds += 75.0
    timers.pop()()
    await until(lambda: logins.replaces(second))
    now.seconds += 75.0
    timers.pop()()  # nobody has used the third one
    await asyncio.sleep(0)
    assert source.asked == 3


async def test_a_connection_is_not_replaced_by_one_with_the_same_login(now: Now) -> None:
    """Libraries of clouds give a token again until shortly before its end."""
    source = Fake(Credentials("first", lasts=100.0), Credentials("first", lasts=20.5))
    logins = of(source)
    first = await logins.login()
    now.seconds += 80.0
    assert (await logins.login()).is_same(first)
    assert not logins.replaces(first)


async def test_while_a_store_refuses_the_new_login_the_one_before_is_used(now: Now) -> None:
    """As it may take a moment until all servers know it."""
    source = Fake(*(Credentials(one, lasts=100.0) for one in ("first", "second", "third")))
    logins, server = of(source), Server("first")
    await logins.let_in(server.connect, is_refused)
    now.seconds += 80.0
    await logins.let_in(server.connect, is_refused)
    await logins.let_in(server.connect, is_refused)
    assert (server.tried, source.asked) == (["first", "second", "first", "first"], 2)
    now.seconds += 10.0
    server.password = "third"
    await logins.let_in(server.connect, is_refused)
    assert server.tried[-1] == "third"


async def test_an_answer_that_comes_too_late_is_for_the_next_connection(now: Now) -> None:
    """Else, a source that is slower than a request would never let anybody in."""
    source = Fake("first", "second", "third")
    logins = of(source)
    source.may_answer.clear()
    waiting = asyncio.create_task(logins.login())
    await until(lambda: source.asked)
    waiting.cancel()
    await asyncio.wait({waiting})
    source.may_answer.set()
    await until(lambda: logins.unanswered(1.0) is None)
    assert (await password(logins), source.asked) == ("first", 1)
    now.seconds += _logins.UNCLAIMED
    assert await password(logins) == "second"


async def test_after_a_refusal_nobody_waits_for_an_answer_from_before(now: Now) -> None:
    source = Fake("old", "new")
    logins = of(source)
    source.may_answer.clear()
    others = asyncio.create_task(password(logins))
    await until(lambda: source.asked)
    now.seconds += 1.0
    logins.refused(Login("ann", Secret("old")))
    waiting = asyncio.create_task(password(logins))
    await until(lambda: source.asked == 2)
    source.may_answer.set()
    assert (await others, await waiting) == ("old", "new")


async def test_if_the_source_is_slow_the_login_is_used_on(now: Now, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question goes on beside that, and its answer is used once it is there."""
    monkeypatch.setattr(_logins, "SLOW", 0.01)
    source = Fake(Credentials("first", lasts=100.0), Credentials("second", lasts=100.0))
    logins = of(source)
    begin = now.seconds
    await logins.login()
    now.seconds = begin + 80.0
    source.may_answer.clear()
    kept = await logins.login()
    assert (kept.password, kept.ends_at) == (Secret("first"), begin + 100.0)
    now.seconds = begin + 82.0
    assert await password(logins) == "first"
    assert source.asked == 2
    now.seconds = begin + 100.0
    waiting = asyncio.create_task(password(logins))
    await asyncio.sleep(0)
    assert not waiting.done()
    source.may_answer.set()
    assert await waiting == "second"
    assert source.asked == 2


async def test_a_login_that_was_refused_is_not_used_while_the_source_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_logins, "SLOW", 0.01)
    source = Fake(Credentials("first", lasts=100.0), Credentials("second", lasts=100.0))
    logins = of(source)
    logins.refused(await logins.login())
    source.may_answer.clear()
    waiting = asyncio.create_task(password(logins))
    await until(lambda: source.asked == 2)
    source.may_answer.set()
    assert await waiting == "second"


async def test_a_login_that_was_refused_is_not_used_while_the_source_fails(now: Now) -> None:
    logins = of(Fake(Credentials("first", lasts=100.0), Unavailable("no token now")))
    logins.refused(await logins.login())
    with pytest.raises(Unavailable, match="no token now"):
        await logins.login()


async def test_the_answer_of_a_command_is_used_for_a_minute(now: Now) -> None:
    source = Fake("first", "second", "third", keeps=COMMAND_KEPT)
    logins = of(source)
    first = await logins.login()
    now.seconds += 59.9
    assert await logins.login() == first
    assert (first.renewed_at, first.ends_at) == (math.inf, math.inf)  # so no open connection is replaced by that
    now.seconds += 0.1
    second = await logins.login()
    assert second.password == Secret("second")
    logins.refused(second)
    assert await password(logins) == "third"


async def test_a_command_that_fails_after_its_minute_leaves_no_login(now: Now) -> None:
    """Nobody knows how long the one of before lasts."""
    source = Fake("first", Unavailable("ended with status 1"), keeps=COMMAND_KEPT)
    logins = of(source)
    await logins.login()
    now.seconds += 60.0
    with pytest.raises(Unavailable, match="ended with status 1"):
        await logins.login()


# --- failures ---


@pytest.mark.parametrize("error", [ConfigError("can't be read"), Unavailable("no token now")])
async def test_a_source_that_fails_at_first_says_whether_that_may_pass(error: TenureError) -> None:
    with pytest.raises(type(error), match=str(error)):
        await of(Fake(error)).login()


async def test_what_worked_before_is_tried_again() -> None:
    logins = of(Fake("first", ConfigError("can't be read"), Unavailable("no token now")))
    await logins.login()
    with pytest.raises(Unavailable, match=r"^can't be read \(it worked before, so tenure tries again\)$"):
        await logins.login()
    with pytest.raises(Unavailable, match=r"^no token now$"):
        await logins.login()


async def test_a_source_that_takes_too_long_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_logins, "ASK_MAX", 0.01)
    source = Fake("first")
    source.may_answer.clear()
    with pytest.raises(Unavailable, match=r"the fake gave no password within 0\.01 s"):
        await of(source).login()


async def test_a_system_without_threads_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="the fake can't be asked now: can't start new thread"):
        await of(Fake(cast(Any, RuntimeError("can't start new thread")))).login()


async def test_a_bug_in_a_source_of_ours_is_not_hidden() -> None:
    with pytest.raises(TypeError):
        await of(Fake(cast(Any, TypeError("a bug")))).login()


async def test_a_store_without_logins_that_have_no_user_says_so() -> None:
    source = Fake(Credentials("first"), Credentials("second", user="bob"), Credentials("third"))
    logins = of(source, None, needs_user="etcd://host")
    expected = (
        r"^the fake gives a password without a user, and etcd://host needs one; write the user before the @ of the URL"
    )
    with pytest.raises(ConfigError, match=expected):
        await logins.login()
    assert (await logins.login()).user == "bob"
    with pytest.raises(Unavailable, match=expected):
        await logins.login()


async def test_the_user_of_the_credentials_comes_before_the_one_of_the_url() -> None:
    logins = of(Fake(Credentials("first"), Credentials("second", user="bob")), "ann")
    assert [(await logins.login()).user for _ in range(2)] == ["ann", "bob"]
    assert (await of(Fake("first"), None).login()).user is None


async def test_old_passwords_are_not_shown_although_the_newest_is_given_again_and_again() -> None:
    answers = [f"hush{number}number" for number in range(_logins.QUOTABLE)]
    logins = of(Fake(*answers))
    for _ in range(3 * _logins.QUOTABLE):
        await logins.login()
    assert redacted(" ".join(answers)) == " ".join(["***"] * len(answers))


# --- functions of the caller ---


@contextmanager
def elsewhere() -> Iterator[LoopThread]:
    """Yield a thread with a loop, as the one on which leases are renewed."""
    thread = LoopThread()
    thread.start("elsewhere")
    try:
        yield thread
    finally:
        thread.end()


@pytest.fixture(params=["on its loop", "on another loop"])
def asked(request: pytest.FixtureRequest) -> Iterator[Callable[[Given], Awaitable[Credentials]]]:
    """How a function is asked: on the loop that has opened the backend, or on that of renewals."""
    with ExitStack() as stack:
        if request.param == "on its loop":
            yield lambda given: given.ask()
        else:
            thread = stack.enter_context(elsewhere())
            yield lambda given: thread.call(given.ask)


Asked = Callable[[Given], Awaitable[Credentials]]


def given(ask: Any) -> Given:
    return Given(ask, asyncio.get_running_loop())


@pytest.mark.parametrize("answer", [HUSH, Secret(HUSH), Credentials(HUSH, user="bob", lasts=9.0)])
async def test_a_function_runs_in_a_thread_and_what_it_awaits_on_the_loop_that_has_opened(
    asked: Asked, answer: Any
) -> None:
    here, places = asyncio.get_running_loop(), list[object]()

    def function() -> Any:
        places.append(threading.current_thread().name)
        return answer

    async def coroutine_function() -> Any:
        await asyncio.sleep(0)
        places.append(asyncio.get_running_loop())
        return answer

    expected = answer if isinstance(answer, Credentials) else Credentials(answer)
    assert await asked(given(function)) == expected
    assert await asked(given(coroutine_function)) == expected
    assert places == ["tenure-credentials", here]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


ERRORS: dict[str, tuple[BaseException, str]] = {
    "an error": (ValueError("no"), "ValueError: no"),
    "a time limit": (TimeoutError("late"), "TimeoutError: late"),
    "an exit": (SystemExit(3), "SystemExit: 3"),
    "a cancelled task of its own": (asyncio.CancelledError(), "CancelledError: "),
    "a base exception": (type("Odd", (BaseException,), {})("odd"), "Odd: odd"),
    "one that can't be printed": (Unprintable(), "Unprintable, which can't be printed"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_of_the_function_is_unavailable_and_ends_no_loop(
    asked: Asked, error: str, is_async: bool
) -> None:
    raised, said = ERRORS[error]

    def function() -> str:
        raise raised

    async def coroutine_function() -> str:
        await asyncio.sleep(0)
        raise raised

    source = given(coroutine_function if is_async else function)
    with pytest.raises(Unavailable) as failed:
        await asked(source)
    assert str(failed.value) == f"credentials= failed: {said}"
    assert failed.value.__cause__ is raised
    assert await asked(given(lambda: HUSH)) == Credentials(HUSH)


async def test_an_error_of_the_function_does_not_show_a_password_of_before() -> None:
    answers: list[Any] = [HUSH]

    def function() -> str:
        if not answers:
            raise ValueError(f"{HUSH} is over")
        return str(answers.pop())

    logins = of(given(function))
    await logins.login()
    with pytest.raises(Unavailable, match=r"^credentials= failed: ValueError: \*\*\* is over$"):
        await logins.login()


@pytest.mark.parametrize("error", [ConfigError("no region is set"), Unavailable("no token now")])
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_of_tenure_stays_as_it_is(asked: Asked, error: TenureError, is_async: bool) -> None:
    def function() -> str:
        raise error

    async def coroutine_function() -> str:
        raise error

    with pytest.raises(type(error)) as failed:
        await asked(given(coroutine_function if is_async else function))
    assert failed.value is error


@pytest.mark.parametrize("answer", [None, 7, HUSH.encode(), [HUSH], (HUSH, "user"), {"password": HUSH}])
async def test_another_type_is_refused_without_its_value(answer: object) -> None:
    with pytest.raises(ConfigError) as failed:
        await given(lambda: answer).ask()
    assert str(failed.value) == (
        f"credentials= must return tenure.Credentials, or the password as a str, not {type(answer).__name__}"
    )


async def test_an_empty_password_is_refused() -> None:
    for answer in ("", Secret("")):
        with pytest.raises(ConfigError, match="is empty"):
            await given(lambda answer=answer: answer).ask()


async def test_the_cancellation_of_who_asks_ends_what_the_function_awaits(asked: Asked) -> None:
    ended, begun = asyncio.Event(), asyncio.Event()

    async def coroutine_function() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    asking = asyncio.ensure_future(asked(given(coroutine_function)))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await ended.wait()


async def test_a_coroutine_that_takes_too_long_is_cancelled(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_logins, "ASK_MAX", 0.05)
    ended = asyncio.Event()

    async def coroutine_function() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    logins = of(given(coroutine_function))
    with pytest.raises(Unavailable, match=r"credentials= gave no password within 0\.05 s"):
        await asked(cast(Any, SimpleNamespace(ask=logins.login)))
    await ended.wait()


OVER = "the event loop that has opened the backend is over, so credentials= can't be asked"


async def test_when_the_loop_that_has_opened_is_over_a_coroutine_can_not_be_asked() -> None:
    async def coroutine_function() -> str:
        raise AssertionError

    async def make(ask: Any) -> Given:
        return given(ask)

    opened = await asyncio.to_thread(lambda: asyncio.run(make(coroutine_function)))
    with pytest.raises(Unavailable, match=OVER):
        await opened.ask()
    opened = await asyncio.to_thread(lambda: asyncio.run(make(lambda: HUSH)))
    assert await opened.ask() == Credentials(HUSH)


async def test_a_loop_that_ends_while_it_is_asked_is_over() -> None:
    begun = threading.Event()

    async def coroutine_function() -> str:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    thread = LoopThread()
    thread.start("ends early")
    asking = asyncio.create_task(Given(coroutine_function, thread.loop).ask())
    await until(begun.is_set)
    await asyncio.to_thread(thread.end)
    with pytest.raises(Unavailable, match=OVER):
        await asking


# --- files ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(0o600)
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"hush", "hush"),
        (b"hush\n", "hush"),
        (b"hush\r\n", "hush"),
        (b" hush \n", " hush "),
        ("hüsh\n".encode(), "hüsh"),
        (b"h" * PASSWORD_MAX, "h" * PASSWORD_MAX),
    ],
    ids=["bare", "newline", "CRLF", "blanks", "UTF-8", "longest"],
)
async def test_a_file_has_the_password_and_perhaps_a_newline(file: Path, content: bytes, expected: str) -> None:
    file.write_bytes(content)
    assert await PasswordFile(str(file)).ask() == Credentials(expected)


REFUSED = {
    "empty": (b"", "has no password: it is empty"),
    "a newline": (b"\n", "has no password: it is empty"),
    "CRLF": (b"\r\n", "has no password: it is empty"),
    "two lines": (b"hush\nmore\n", "has several lines, or control characters"),
    "an empty line": (b"hush\n\n", "has several lines, or control characters"),
    "a null": (b"hush\0", "has several lines, or control characters"),
    "binary": (b"hush\xff\xfe", "has what is no text in UTF-8"),
    "too long": (b"h" * PASSWORD_MAX + b"\n", "has 65,537 bytes, and a password has at most 65,536"),
}


@pytest.mark.parametrize("content", REFUSED)
async def test_a_file_with_something_else_is_refused_and_not_shown(file: Path, content: str) -> None:
    written, said = REFUSED[content]
    file.write_bytes(written)
    with pytest.raises(ConfigError) as failed:
        await PasswordFile(str(file)).ask()
    assert str(failed.value).startswith(f"password_file={file} {said}")
    assert "hush" not in "".join(traceback.format_exception(failed.value))


@is_posix
async def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it
    reasons = {"pipe": "it is a pipe or a device", "none": "No such file or directory", ".": "Is a directory"}
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=rf"^password_file={tmp_path / name} can't be read: {reason}"):
            await PasswordFile(str(tmp_path / name)).ask()
        with pytest.raises(
            ConfigError, match=rf"^password_file={tmp_path / name} of redis://h can't be read: {reason}"
        ):
            made(PasswordOptions(password_file=str(tmp_path / name)))


async def test_a_file_is_read_for_each_login(file: Path) -> None:
    file.write_text("first\n")
    logins = made(PasswordOptions(password_file=str(file)))
    assert await password(logins) == "first"
    file.write_text("second\n")
    assert await password(logins) == "second"
    file.unlink()
    with pytest.raises(Unavailable, match=r"can't be read: No such file or directory \(it worked before"):
        await logins.login()


@is_posix
def test_a_file_that_others_can_read_has_a_warning(file: Path) -> None:
    file.write_text(HUSH)
    assert made(PasswordOptions(password_file=str(file))).warnings == ()
    file.chmod(0o644)
    [warning] = made(PasswordOptions(password_file=str(file))).warnings
    assert (warning.name, warning.code) == ("password_file", "secret-file-mode")


# --- commands ---


def command(written: str) -> PasswordCommand:
    return PasswordCommand.parse(Secret(written), "redis://h")


@is_posix
async def test_a_command_prints_the_password() -> None:
    assert await command("printf 'hush seven\\n'").ask() == Credentials("hush seven")


@is_posix
@pytest.mark.parametrize("content", ["empty", "two lines", "a null", "binary", "too long"])
async def test_a_command_that_prints_something_else_is_refused(file: Path, content: str) -> None:
    written, said = REFUSED[content]
    file.write_bytes(written)
    with pytest.raises(ConfigError) as failed:
        await command(f"cat {file}").ask()
    assert str(failed.value).startswith(f"the password command 'cat' {said}")
    assert "hush" not in "".join(traceback.format_exception(failed.value))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"password": f"{HUSH}\n"}, r"Credentials\(password=…\) ends with a line end; take it off"),
        ({"password": f"{HUSH}\r\n"}, r"Credentials\(password=…\) ends with a line end"),
        ({"password": f"{HUSH}\n{HUSH}"}, r"Credentials\(password=…\) has a line end or a NUL"),
        ({"password": f"{HUSH}\ud800"}, r"Credentials\(password=…\) has characters that are no text"),
        ({"password": Secret(f"{HUSH}\0")}, r"Credentials\(password=…\) has a line end or a NUL"),
        (
            {"password": HUSH * 65_536},
            r"Credentials\(password=…\) has [0-9,]+ characters, and must have at most 65,536",
        ),
        ({"password": HUSH, "user": "ann\0options"}, r"Credentials\(user=…\) has a line end or a NUL"),
        ({"password": HUSH, "user": "\udcff"}, r"Credentials\(user=…\) has characters that are no text"),
        (
            {"password": HUSH, "lasts": 10**400},
            r"Credentials\(lasts=…\) must be a number of seconds above 0, not so many",
        ),
    ],
)
def test_what_no_store_takes_is_refused_before_it_is_sent(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as refused:
        Credentials(**arguments)
    assert HUSH not in str(refused.value)


@pytest.mark.parametrize("given", [lambda user: HUSH, Credentials, Fake("first").__class__.ask])
def test_a_function_that_needs_arguments_is_refused_at_once(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"credentials= is called without arguments, and .* needs some"):
        tenure.connect("redis://h", credentials=given)


async def test_the_traceback_of_a_function_that_fails_shows_no_password_that_is_known() -> None:
    loop = asyncio.get_running_loop()
    logins = of(Given(lambda: HUSH, loop))
    await logins.login()

    def fails() -> str:
        raise ValueError(f"the token {HUSH} is over")

    with pytest.raises(Unavailable) as failed:
        await Given(fails, loop).ask()
    assert HUSH not in "".join(traceback.format_exception(failed.value)).replace(f'"the token {HUSH}', "")


@is_posix
async def test_a_command_has_no_shell_and_no_input() -> None:
    assert await command("echo $HOME '*' `ls` '|'").ask() == Credentials("$HOME * `ls` |")
    with pytest.raises(ConfigError, match="the password command 'cat' has no password: it is empty"):
        await command("cat").ask()


@is_posix
@pytest.mark.parametrize(
    ("written", "said"),
    [
        (f"no-such/program {HUSH}", r"the password command 'no-such/program' can't be run: No such file or directory"),
        (f"/ {HUSH}", r"the password command '/' can't be run: Permission denied"),
        (f"'a\0b' {HUSH}", r"the password command '\*\*\*' can't be run: embedded null byte"),
        (HUSH, r"the password command '\*\*\*' can't be run: No such file or directory"),
        ("eyJhbGciOi.eyJzdWIi.s1gnature", r"the password command '\*\*\*' can't be run: No such file or directory"),
        (f"PGPASSWORD={HUSH} psql", r"the password command '\*\*\*' can't be run: No such file or directory"),
    ],
    ids=["unknown", "a folder", "a null", "the secret itself", "a token", "a variable"],
)
async def test_a_command_that_can_not_be_run_is_named_without_what_may_be_secret(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}; name it as this process finds it; no shell") as failed:
        await command(written).ask()
    assert HUSH not in "".join(traceback.format_exception(failed.value))


@pytest.mark.parametrize("written", ["echo a | cat", "cat a && true", "cat a > b", "echo a;", "sleep 9 &", "(echo a)"])
def test_what_needs_a_shell_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="has a sign of the shell, and is run without one; write sh -c"):
        command(written)


@is_posix
async def test_a_command_that_fails_shows_nothing_that_it_has_printed() -> None:
    script = f"echo {HUSH}; printf 'the token {HUSH} \\033[31mis over' >&2; exit 1"
    with pytest.raises(Unavailable, match=r"status 1: the token \*\*\* .*is over; run it by hand") as failed:
        await command(shlex.join(["sh", "-c", script])).ask()
    assert "\033" not in str(failed.value)


@is_posix
async def test_a_command_that_fails_says_why() -> None:
    script = f"echo {HUSH}; echo first >&2; echo please log in >&2; exit 3"
    with pytest.raises(Unavailable, match=r"^the password command 'sh' ended with status 3: please log in; ") as failed:
        await command(shlex.join(["sh", "-c", script])).ask()
    assert HUSH not in str(failed.value)
    with pytest.raises(Unavailable, match=r"^the password command 'false' ended with status 1; "):
        await command("false").ask()
    with pytest.raises(Unavailable) as failed:
        await command(shlex.join(["sh", "-c", "printf %1000d 7 >&2; exit 1"])).ask()
    assert len(str(failed.value)) < 2 * _credential_command.SAID_MAX


@contextmanager
def alive(folder: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether any process has the pipe *alive* in the folder open for writing."""
    os.mkfifo(folder / "alive")
    pipe = os.open(folder / "alive", os.O_RDONLY | os.O_NONBLOCK)

    def is_alive() -> bool:
        try:
            return os.read(pipe, 1) != b""
        except BlockingIOError:
            return True

    try:
        yield is_alive
    finally:
        os.close(pipe)


def holding(folder: Path, then: str) -> PasswordCommand:
    """Return a command that starts another one, which holds its output and the pipe *alive* open."""
    script = f"exec 3> {folder / 'alive'}; echo > {folder / 'begun'}; sleep 600 & {then}"
    return command(shlex.join(["sh", "-c", script]))


@is_posix
@pytest.mark.parametrize("then", ["wait", "exit 0"])
async def test_all_that_a_late_command_has_started_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Also if only what it has started goes on, and holds its output open."""
    monkeypatch.setattr(_logins, "ASK_MAX", 0.5)
    with alive(tmp_path) as is_alive:
        with pytest.raises(
            Unavailable, match=r"^the password command 'sh' (took over|gave no password within) 0\.5 s$"
        ):
            await of(holding(tmp_path, then)).login()
        await until(lambda: not is_alive())


@is_posix
async def test_all_that_a_command_has_started_is_killed_when_nobody_wants_it_any_more(tmp_path: Path) -> None:
    with alive(tmp_path) as is_alive:
        asking = asyncio.create_task(holding(tmp_path, "wait").ask())
        await until((tmp_path / "begun").exists)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not is_alive())


@is_posix
@pytest.mark.parametrize("stream", ["1", "2"])
async def test_a_command_that_writes_without_end_is_killed(stream: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^the password command 'sh' wrote more than 1,048,576 bytes, and must print"
    ):
        await command(shlex.join(["sh", "-c", f"exec yes hush >&{stream}"])).ask()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (f"cat '{HUSH}", r"password_command= of redis://h can't be split into words: No closing quotation"),
        (f"cat {HUSH}\\", r"password_command= of redis://h can't be split into words: No escaped character"),
        ("", r"password_command= of redis://h is empty; name a command that prints the password"),
        (" ", r"password_command= of redis://h is empty; name a command that prints the password"),
    ],
)
def test_what_is_no_command_is_refused_at_once(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        made(PasswordOptions(password_command=Secret(written)))


@is_posix
async def test_a_command_is_run_once_a_minute_unless_it_is_refused(tmp_path: Path, now: Now) -> None:
    counted = tmp_path / "counted"
    script = f"echo x >> {counted}; wc -l < {counted} | tr -d ' '"
    logins = made(PasswordOptions(password_command=Secret(shlex.join(["sh", "-c", script]))))
    assert [await password(logins) for _ in range(3)] == ["1", "1", "1"]
    logins.refused(await logins.login())
    assert await password(logins) == "2"
    now.seconds += 60.0
    assert await password(logins) == "3"


# --- which source ---


def made(options: PasswordOptions, source: Source | None = None, **more: Any) -> Logins:
    return logins_of("redis://h", options, source, **{"user": None, "password": None, **more})


def test_there_is_one_password_only(file: Path) -> None:
    of_file, of_command = PasswordOptions(password_file=str(file)), PasswordOptions(password_command=Secret("cat"))
    both = PasswordOptions(str(file), Secret("cat"))
    cases: list[tuple[str, Callable[[], Logins]]] = [
        ("a password and password_file=", lambda: made(of_file, password=Secret(HUSH))),
        ("a password and password_command=", lambda: made(of_command, password=Secret(HUSH))),
        ("a password and credentials=", lambda: made(PasswordOptions(), Fake("x"), password=Secret(HUSH))),
        ("password_file= and password_command=", lambda: made(both)),
        ("password_file= and password_command= and credentials=", lambda: made(both, Fake("x"))),
        ("creds= and password_file=", lambda: made(of_file, login_file="creds=")),
        ("creds= and credentials=", lambda: made(PasswordOptions(), Fake("x"), login_file="creds=")),
    ]
    for said, make in cases:
        with pytest.raises(ConfigError, match=f"^redis://h is given {said}; leave out all but one$"):
            make()
    assert made(PasswordOptions(), login_file="creds=", password=Secret(HUSH)).is_fixed
    assert made(PasswordOptions(), Fake("x"), password=Secret("")).source == "the fake"  # as in user:@host


def test_each_source_has_a_name(file: Path) -> None:
    for options, name in (
        (PasswordOptions(), ""),
        (PasswordOptions(password_file=str(file)), f"password_file={file}"),
        (
            PasswordOptions(password_command=Secret(f"{sys.executable} {HUSH}")),
            f"the password command {sys.executable!r}",
        ),
    ):
        assert made(options).source == name
        assert names_source(options, None) == (name != "")
    assert names_source(PasswordOptions(), Fake("x"))


# --- Credentials ---


def test_credentials_hold_a_secret() -> None:
    for one in (Credentials(HUSH, user="ann", lasts=9), Credentials(Secret(HUSH), "ann", 9.0)):
        assert one.password == one.secret == Secret(HUSH)
        assert one == copy.deepcopy(one)
        for shown in (str(one), repr(one), f"{one}", repr([one]), repr(Login("ann", one.secret))):
            assert HUSH not in shown
        assert "ann" in repr(one)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"password": None}, r"Credentials\(password=…\) must be a str, not NoneType"),
        ({"password": HUSH.encode()}, r"Credentials\(password=…\) must be a str, not bytes"),
        ({"password": ""}, r"Credentials\(password=…\) is empty; give the password, or the token"),
        ({"password": Secret("")}, r"Credentials\(password=…\) is empty; give the password, or the token"),
        ({"user": None}, r"Credentials\(user=…\) must be a str, not NoneType"),
        ({"user": Secret(HUSH)}, r"Credentials\(user=…\) must be a str, not Secret"),
        ({"lasts": 0}, r"Credentials\(lasts=…\) must be a number of seconds above 0, not 0"),
        ({"lasts": -1.5}, r"Credentials\(lasts=…\) must be a number of seconds above 0, not -1\.5"),
        ({"lasts": math.nan}, r"Credentials\(lasts=…\) must be a number of seconds above 0, not nan"),
        ({"lasts": math.inf}, r"Credentials\(lasts=…\) must be a number of seconds above 0, not inf"),
        ({"lasts": HUSH}, r"Credentials\(lasts=…\) must be a number of seconds above 0, not str"),
    ],
)
def test_credentials_of_other_types_are_refused_without_their_values(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        Credentials(**{"password": HUSH, **arguments})


# --- connect ---


def ask() -> str:
    return HUSH


def test_each_store_without_passwords_takes_no_credentials() -> None:
    assert set(WITHOUT_PASSWORDS) < set(_registry.BACKENDS)


@pytest.mark.parametrize("scheme", sorted(_registry.BACKENDS))
def test_each_store_takes_credentials_or_says_what_it_has_instead(scheme: str) -> None:
    url = Url.parse("memory:" if scheme == "memory" else f"{scheme}://host/path")
    if scheme in WITHOUT_PASSWORDS:
        with pytest.raises(ConfigError, match=r" takes no credentials=: .*; leave them out$"):
            tenure.connect(url.shown, credentials=ask)
        return
    require_credentials(ask, url)
    try:
        module = _registry.load(url)
    except BackendNotInstalled as missing:
        skip_or_fail(str(missing))
    assert "credentials" in inspect.signature(module.open).parameters


@pytest.mark.parametrize("wrong", [HUSH, Secret(HUSH), Credentials(HUSH), 7])
def test_credentials_that_are_no_function_are_refused_without_their_value(wrong: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        tenure.connect("redis://host", credentials=wrong)
    assert str(refused.value) == (
        "credentials= must be a function that returns tenure.Credentials, or a password, not "
        f"{type(wrong).__name__}; a password that stays the same belongs into the URL"
    )


class Store:
    """A store, and the module that opens it, which notes what it is given and where."""

    def __init__(self) -> None:
        self.given: Given | None = None

    def open(self, url: Url, *, clock: Any = None, credentials: Given | None = None) -> Store:
        self.given = credentials
        return self

    async def close(self) -> None:
        pass

    async def ask(self) -> Credentials:
        """Ask as a store does when leases are renewed."""
        assert self.given is not None
        return await self.given.ask()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()
    monkeypatch.setattr(_registry, "load", lambda url: found)
    return found


def renewals() -> RenewalThread:
    """Return the thread on which leases are renewed."""
    assert RenewalThread._shared is not None
    return RenewalThread._shared


@pytest.mark.parametrize("make", [tenure.connect, tenure.Service])
@pytest.mark.parametrize("is_named_by_the_environment", [False, True])
async def test_a_backend_of_a_loop_asks_its_caller_there(
    store: Store, make: Any, is_named_by_the_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the store asks on the thread of renewals."""
    monkeypatch.setenv("TENURE_URL", "redis://host")
    places: list[object] = []

    async def coroutine_function() -> str:
        places.append(asyncio.get_running_loop())
        return HUSH

    given = () if is_named_by_the_environment else ("redis://host",)
    async with make(*given, credentials=coroutine_function):
        assert await renewals().call(store.ask) == Credentials(HUSH)
        assert await store.ask() == Credentials(HUSH)
    assert places == [asyncio.get_running_loop()] * 2


@pytest.mark.parametrize("make", [tenure.sync.connect, tenure.sync.Service])
def test_a_backend_for_threads_asks_its_caller_on_threads_of_its_own(store: Store, make: Any) -> None:
    """Never on the one of renewals, which has opened it: also a coroutine may block."""
    places: list[str] = []

    def function() -> str:
        places.append(threading.current_thread().name)
        return HUSH

    async def coroutine_function() -> str:
        await asyncio.sleep(0)
        return function()

    for ask in (function, coroutine_function):
        with make("redis://host", credentials=ask):
            assert renewals().call_blocking(store.ask) == Credentials(HUSH)
    assert places == ["tenure-credentials"] * 2


async def test_without_credentials_a_store_is_given_none(store: Store) -> None:
    async with tenure.connect("memory:"):
        assert store.given is None


async def test_a_backend_that_is_given_has_credentials_of_its_own(store: Store) -> None:
    async with tenure.connect("redis://host", credentials=ask) as backend:
        for make in (tenure.Service, tenure.sync.Backend):
            with pytest.raises(ConfigError, match=r"has credentials of its own; give it to tenure\.connect\(\)"):
                make(backend, credentials=ask)
