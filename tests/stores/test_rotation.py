"""A login is exchanged as docs/security.md says: by a second user, or by another password of the first, under load."""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sized
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("nats")
pytest.importorskip("redis")


import tenure
from tenure._election.term import END_REASONS
from tenure._logins import Login, logins_of
from tenure._logins import Logins as LoginsOfClient
from tenure._registry import load
from tenure._url import Url
from tenure.events import (
    BrokerUnanswered,
    CampaignFailed,
    Event,
    LockEnded,
    RenewalMissed,
    Renewed,
    StandingBy,
    TermEnding,
)
from tests.durations import stretched, until
from tests.servers import patient, private
from tests.stores.users import KINDS, OF_ONE_USER, PASSWORDS, Passwords

TTL, RENEW_EVERY = 60.0, 0.1
"""Seconds of a lease that no test waits for, and of the pauses between its renewals."""
REPLACED = 4
"""How often a password is replaced in a test."""


ELECTIONS = [store for store in KINDS if store != "rabbitmq"]
QUEUES = [store for store in KINDS if store != "etcd"]

REPLACING = {**KINDS, "azure": OF_ONE_USER["azure"]}
"""Servers on which the password of a user is replaced; an account of Azure has a key."""

_made: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    """End the servers of this file after its last test."""
    yield
    while _made:
        _made.popitem()[1].server.close()


@pytest.fixture
async def logins(store: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Any]:
    """Yield the users of a server, of which *first* is one; no password may be logged, by drivers either."""
    caplog.set_level(logging.DEBUG)
    if store not in _made:
        kind, options, make = REPLACING[store]
        _made[store] = make(private(kind, **options))
        await _made[store].prepare()
    found = _made[store]
    await found.add("first")
    yield found
    for user in [*found.users]:
        await found.remove(user)
    logged = "\n".join(map(logging.Formatter().format, caplog.get_records("call")))  # its text is of this phase
    assert logged
    assert [one for one in [*PASSWORDS.values(), "hush0000next", "hush0001next"] if one in logged] == []


@asynccontextmanager
async def process(logins: Any, user: str) -> AsyncIterator[tuple[tenure.Backend, list[Event]]]:
    """Yield a backend with the login of *user*, as a process has it, and its events."""
    events: list[Event] = []
    scheme, _, rest = logins.server.url.partition("://")
    place = rest.rpartition("@")[2]
    async with tenure.connect(
        patient(f"{scheme}://{user}:{PASSWORDS[user]}@{place}"), on_event=events.append
    ) as backend:
        yield backend, events


def count(events: list[Event], kind: type[Event]) -> int:
    return sum(type(event) is kind for event in events)


async def until_next(events: list[Event], kind: type[Event], more: int = 2) -> None:
    """Wait for *more* events of a *kind*: the first may be of a request that was on its way."""
    before = count(events, kind)
    await until(lambda: count(events, kind) >= before + more)


async def refusal(ask: Callable[[], Awaitable[object]]) -> str:
    """Return the error of a request; it must be ``Unavailable``. Empty if there is an answer."""
    try:
        await ask()
    except tenure.Unavailable as error:
        return str(error)
    return ""


async def lead(
    backend: tenure.Backend, name: str, stop: asyncio.Event, terms: list[tenure.Term], ttl: float = TTL
) -> None:
    """Lead *name* until *stop*, and note the terms."""

    async def work(term: tenure.Term) -> None:
        terms.append(term)
        await stop.wait()

    await backend.election(name, ttl=ttl, renew_every=RENEW_EVERY, retry_every=RENEW_EVERY).run(work, stop=stop)


@pytest.mark.parametrize("store", ELECTIONS)
async def test_a_leader_with_a_second_user_takes_over_and_keeps_its_term(logins: Any, store: str, name: str) -> None:
    before: list[tenure.Term] = []
    after: list[tenure.Term] = []
    ends, ends_later = asyncio.Event(), asyncio.Event()
    async with process(logins, "first") as (old, old_events):
        leading = asyncio.create_task(lead(old, name, ends, before))
        await until(lambda: before)
        await logins.add("second")
        await until_next(old_events, Renewed)
        async with process(logins, "second") as (new, events):
            following = asyncio.create_task(lead(new, name, ends_later, after))
            await until_next(events, StandingBy, 1)
            assert await token_of(new, name) == before[0].token
            ends.set()
            await leading
            await until(lambda: after)
            await logins.remove("first")
            await until_next(events, Renewed, 3)
            assert await token_of(new, name) == after[0].token > before[0].token
            ends_later.set()
            await following
    assert (len(before), len(after)) == (1, 1)


async def token_of(backend: tenure.Backend, name: str) -> int | None:
    leader = await backend.election(name).leader()
    return None if leader is None else leader.token


@pytest.mark.parametrize("store", ELECTIONS)
async def test_a_term_of_a_user_that_is_removed_ends_by_its_own_clock_only(logins: Any, store: str, name: str) -> None:
    """One with a long lease goes on when the user is there again, and a candidate has waited for it all the time."""
    terms: list[tenure.Term] = []
    short: list[tenure.Term] = []
    stop = asyncio.Event()
    async with process(logins, "first") as (old, events), process(logins, "first") as (other, others):
        running = [asyncio.create_task(lead(old, name, stop, terms))]
        await until(lambda: terms)
        running += [asyncio.create_task(lead(other, f"{name}, short", stop, short, stretched(1.5)))]
        running += [asyncio.create_task(lead(other, name, stop, terms))]
        await until(lambda: short and count(others, StandingBy))

        await logins.remove("first")
        await until_next(events, RenewalMissed)
        await until_next(others, CampaignFailed, 1)
        await until(lambda: refusal(old.leaders))
        await until(short[0].lost.is_set)
        assert END_REASONS["denied"] not in short[0].loss_message()
        terms[0].check()
        assert not any(task.done() for task in running)

        await logins.add("first")
        await until_next(events, Renewed)
        await until(lambda: len(short) > 1)
        assert short[1].token > short[0].token
        assert (len(terms), count(events, TermEnding)) == (1, 0)
        assert await token_of(other, name) == terms[0].token
        stop.set()
        await asyncio.gather(*running)


@pytest.mark.parametrize("store", QUEUES)
async def test_a_consumer_with_a_second_user_gets_all_that_the_first_sent(logins: Any, store: str, name: str) -> None:
    name = name[-40:]
    handled: Counter[str] = Counter()
    goes_on, stop = asyncio.Event(), asyncio.Event()

    async def handle(message: tenure.Message) -> None:
        if message.id == "held":
            await goes_on.wait()
        handled[message.id] += 1

    async with process(logins, "first") as (old, _), process(logins, "second") as (new, events):
        await old.queue(name).send_batch([tenure.Outgoing(b"x", id=one) for one in ("done", "held", "waiting")])
        [message] = await old.queue(name).receive()
        await message.complete()
        await logins.add("second")
        consuming = asyncio.create_task(new.queue(name).consume(handle, concurrency=3, stop=stop))
        await until(lambda: handled["waiting"])
        await old.queue(name).send(b"x", id="late")
        await until(lambda: handled["late"])
        await logins.remove("first")
        await new.queue(name).send(b"x", id="of the second")
        await until(lambda: handled["of the second"])
        goes_on.set()
        await until(lambda: handled["held"])
        stop.set()
        await consuming
        stats = await new.queue(name).stats()
        assert (stats.ready, stats.locked, stats.dead) == (0, 0, 0)
    assert handled == Counter(["held", "waiting", "late", "of the second"])
    assert (count(events, LockEnded), count(events, BrokerUnanswered)) == (0, 0)


CLOSES_LOCKS = {"rabbitmq"}
"""Stores that close the connection of a user that is removed, and with it the locks: messages are delivered again."""


@pytest.mark.parametrize("store", QUEUES)
async def test_a_consumer_of_a_user_that_is_removed_goes_on_when_it_is_there_again(
    logins: Any, store: str, name: str
) -> None:
    name = name[-40:]
    handled: list[str] = []
    begun, goes_on, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(message: tenure.Message) -> None:
        if message.id == "held":
            begun.set()
            await goes_on.wait()
        handled.append(message.id)

    async with process(logins, "first") as (old, events):
        queue = old.queue(name)
        await queue.send(b"x", id="held")
        consuming = asyncio.create_task(queue.consume(handle, concurrency=2, stop=stop))
        await begun.wait()
        await logins.remove("first")
        await until(lambda: refusal(lambda: queue.send(b"x", id="refused")))
        await until(lambda: count(events, BrokerUnanswered))
        await logins.add("first")
        await until(lambda: is_sent(queue))
        await until(lambda: "again" in handled)
        goes_on.set()
        await until(lambda: "held" in handled)
        stop.set()
        await consuming
        assert (await queue.stats()).dead == 0
    assert handled.count("held") == 1
    assert (count(events, LockEnded) > 0) == (store in CLOSES_LOCKS)


async def is_sent(queue: tenure.Queue) -> bool:
    return not await refusal(lambda: queue.send(b"x", id="again"))


# --- another password of the same user ---


@asynccontextmanager
async def connected(logins: Any, passwords: Passwords) -> AsyncIterator[tuple[tenure.Backend, list[Event]]]:
    """Yield a backend that asks for its login."""
    events: list[Event] = []
    scheme, _, rest = logins.server.url.partition("://")
    url = patient(f"{scheme}://{rest.rpartition('@')[2]}")
    async with tenure.connect(url, credentials=passwords.credentials, on_event=events.append) as backend:
        yield backend, events


@pytest.mark.parametrize("store", [*ELECTIONS, "azure"])
async def test_a_leader_keeps_its_term_while_its_password_is_replaced_again_and_again(
    logins: Any, store: str, name: str
) -> None:
    passwords, terms, stop = Passwords(logins), list[tenure.Term](), asyncio.Event()
    async with connected(logins, passwords) as (backend, events), connected(logins, passwords) as (other, others):
        running = [asyncio.create_task(lead(backend, name, stop, terms))]
        await until(lambda: terms)
        running.append(asyncio.create_task(lead(other, name, stop, terms)))
        await until(lambda: count(others, StandingBy))
        for number in range(REPLACED):
            await passwords.replace(number)
            await until_next(events, Renewed)
        assert await token_of(other, name) == terms[0].token
        assert (len(terms), count(events, TermEnding)) == (1, 0)
        terms[0].check()
        stop.set()
        await asyncio.gather(*running)
    assert passwords.asked > REPLACED


@pytest.mark.parametrize("store", [*ELECTIONS, "azure"])
async def test_a_source_that_fails_ends_no_term(logins: Any, store: str, name: str) -> None:
    """A vault may be away for longer than a token lasts: what is connected goes on as long as the server lets it."""
    terms, stop, events = list[tenure.Term](), asyncio.Event(), list[Event]()
    asked = 0

    def ask() -> tenure.Credentials:
        nonlocal asked
        asked += 1
        if terms:
            raise LookupError("the vault is sealed")
        return tenure.Credentials(PASSWORDS["first"], user=logins.user, lasts=stretched(0.5))

    scheme, _, rest = logins.server.url.partition("://")
    url = patient(f"{scheme}://{rest.rpartition('@')[2]}")
    async with tenure.connect(url, credentials=ask, on_event=events.append) as backend:
        leading = asyncio.create_task(lead(backend, name, stop, terms))
        await until(lambda: terms)
        over = asyncio.get_running_loop().time() + 2 * stretched(0.5)
        await until(lambda: asyncio.get_running_loop().time() > over)
        await until_next(events, Renewed, 5)
        assert (len(terms), count(events, TermEnding)) == (1, 0)
        stop.set()
        await leading


async def until_more(noted: Sized, more: int = 4) -> None:
    before = len(noted)
    await until(lambda: len(noted) >= before + more)


@pytest.mark.parametrize("store", [*QUEUES, "azure"])
async def test_no_message_is_lost_while_a_password_is_replaced_again_and_again(
    logins: Any, store: str, name: str
) -> None:
    passwords, handled, stop = Passwords(logins), Counter[str](), asyncio.Event()
    sent: list[str] = []

    async def handle(message: tenure.Message) -> None:
        handled[message.id] += 1

    async def send(queue: tenure.Queue) -> None:
        while not stop.is_set():
            one = str(len(sent))
            if not await refusal(partial(queue.send, b"x", id=one)):  # else, it may have been sent, and is sent again
                sent.append(one)

    async with connected(logins, passwords) as (backend, _), connected(logins, passwords) as (other, _):
        queue = backend.queue(name[-40:])
        sending = asyncio.create_task(send(other.queue(name[-40:])))
        consuming = asyncio.create_task(queue.consume(handle, concurrency=3, stop=stop))
        for number in range(REPLACED):
            await until_more(handled)
            await until_more(sent)
            await passwords.replace(number)
        await until_more(sent)
        await until_more(handled)
        stop.set()
        await sending
        await consuming
        await queue.drain()
        left = asyncio.Event()
        again = asyncio.create_task(queue.consume(handle, stop=left))
        await until(lambda: set(sent) <= set(handled))
        left.set()
        await again
        assert (await queue.stats()).dead == 0
    assert passwords.asked > REPLACED


class _AskedOnce(LoginsOfClient):
    """Goes on with the first login, as clients do that are given a password when they are made."""

    _first: Login | None = None

    async def login(self) -> Login:
        if self._first is None:
            self._first = await super().login()
        return self._first

    def refused(self, login: Login) -> None:
        pass


@pytest.mark.parametrize("store", REPLACING)
async def test_a_planted_client_that_asks_once_is_found(
    logins: Any, store: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = load(Url.parse(logins.server.url))
    client = importlib.import_module(f"{package.__name__}.client")
    monkeypatch.setattr(client if hasattr(client, "logins_of") else package, "logins_of", planted)
    passwords = Passwords(logins)
    async with connected(logins, passwords) as (backend, _):
        ask = backend.leaders if store in [*ELECTIONS, "azure"] else backend.queue(name[-40:]).stats
        await ask()
        await passwords.replace(0)
        await until(lambda: refusal(ask))
        assert re.search("refused the login|AuthorizationFailure", await refusal(ask))  # Azurite tells both apart less


def planted(*arguments: Any, **named: Any) -> LoginsOfClient:
    made = logins_of(*arguments, **named)
    made.__class__ = _AskedOnce
    return made
