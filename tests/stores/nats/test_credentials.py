"""Logins at NATS whose password the caller gives: by a function, a file or a command, asked for each new connection."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import nats
import nkeys
import pytest
from nats.aio.msg import Msg

import tenure
from tenure._backends.nats.address import address_of
from tenure._url import Url
from tenure.events import Event, LockEnded, RenewalMissed, Renewed, StandingBy, TermEnding
from tests.durations import until
from tests.explained import facts_by_name
from tests.servers import Nats, patient, private
from tests.stores.nats.identities import Identity

TTL, RENEW_EVERY, NEVER = 900.0, 0.1, 250.0
"""Seconds of a lease, between its renewals, and between the polls of a candidate that no test waits for."""
OLD, NEW = "hush1old", "hush2new"


class Passwords:
    """A source in the hands of a test, in each form that callers have; and how often the function was asked."""

    def __init__(self, folder: Path, *newest: str) -> None:
        self.file = folder / "password"
        self.asked = 0
        self.newest = list(newest)
        self.write(newest[0])

    def write(self, password: str) -> None:
        self.file.write_text(f"{password}\n")
        self.file.chmod(0o600)

    def replace(self, password: str) -> None:
        self.newest = [password]
        self.write(password)

    def ask(self) -> str:
        self.asked += 1
        return self.newest.pop(0) if len(self.newest) > 1 else self.newest[0]

    async def ask_async(self) -> tenure.Credentials:
        await asyncio.sleep(0)
        return tenure.Credentials(self.ask())

    def by(self, form: str, url: str, on_event: Callable[[Event], None] | None = None) -> tenure.Backend:
        """Return a backend at *url* that gets its passwords in this form."""
        url = patient(url)
        match form:
            case "function":
                return tenure.connect(url, credentials=self.ask, on_event=on_event)
            case "async function":
                return tenure.connect(url, credentials=self.ask_async, on_event=on_event)
            case "password_file":
                return tenure.connect(f"{url}&password_file={self.file}", on_event=on_event)
        return tenure.connect(f"{url}&password_command={quote(f'cat {self.file}')}", on_event=on_event)


FORMS = {
    "function": "credentials=",
    "async function": "credentials=",
    "password_file": "password_file=",
    "password_command": "the password command ",
}
"""By form of the source, how messages begin to name it."""


@pytest.fixture(scope="module")
def server() -> Iterator[Nats]:
    with private(Nats, password="r00t", users={"worker": (OLD, {})}) as server:
        yield server


@pytest.fixture
def worker(server: Nats) -> Iterator[str]:
    """The URL of a server where the password of the user is the old one, until a test replaces it."""
    yield server.url_as("worker@")
    if server.users["worker"][0] != OLD:
        set_password(server, OLD)


def set_password(server: Nats, password: str) -> None:
    """Replace the password of the user; the server closes its connections."""
    server.users["worker"] = password, {}
    server.reconfigure()


@pytest.fixture
def passwords(tmp_path: Path) -> Passwords:
    return Passwords(tmp_path, OLD)


async def login_fact(backend: tenure.Backend) -> tenure.Fact:
    return facts_by_name((await backend.diagnose()).facts)["login"]


# --- let in ---


@pytest.mark.parametrize("form", FORMS)
async def test_a_user_of_the_url_is_let_in(worker: str, passwords: Passwords, form: str) -> None:
    async with passwords.by(form, worker) as backend:
        assert await backend.leaders() is not None
        fact = await login_fact(backend)
    assert fact.value.startswith(f"a user and a password, from {FORMS[form]}")
    assert not fact.advice
    assert OLD not in str(fact)


async def test_credentials_name_the_user(server: Nats, worker: str) -> None:
    def ask() -> tenure.Credentials:
        return tenure.Credentials(OLD, user="worker")

    for url in (server.url_as(), server.url_as("nobody@")):
        async with tenure.connect(patient(url), credentials=ask) as backend:
            assert await backend.leaders() is not None
            assert (await login_fact(backend)).value == "a user and a password, from credentials="


async def test_without_a_user_it_is_a_token(tmp_path: Path) -> None:
    with private(Nats, token=OLD) as server:
        for form in ("function", "password_file"):
            async with Passwords(tmp_path, OLD).by(form, server.url_as()) as backend:
                assert await backend.leaders() is not None
                fact = await login_fact(backend)
            assert fact.value.startswith(f"a token, from {FORMS[form]}")


# --- replaced ---


@pytest.mark.parametrize("form", FORMS)
async def test_what_is_held_is_held_on_while_the_password_is_replaced(
    server: Nats, worker: str, passwords: Passwords, form: str, name: str
) -> None:
    """Renewals, a consumer, its lock and hints go on; a candidate that never polls leads when the leader resigns."""
    name = name[-40:].translate(str.maketrans("[] ", "---"))
    handled: Counter[str] = Counter()
    terms: list[tenure.Term] = []
    goes_on, resigns, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(message: tenure.Message) -> None:
        if message.id == "held":
            await goes_on.wait()
        handled[message.id] += 1

    async def lead(backend: tenure.Backend, ends: asyncio.Event) -> None:
        async def work(term: tenure.Term) -> None:
            terms.append(term)
            await ends.wait()

        election = backend.election(name, ttl=TTL, renew_every=RENEW_EVERY, retry_every=NEVER)
        await election.run(work, stop=ends)

    events: list[Event] = []
    others: list[Event] = []
    async with passwords.by(form, worker, events.append) as one, passwords.by(form, worker, others.append) as two:
        queue = one.queue(name)
        await queue.send_batch([tenure.Outgoing(b"x", id=each) for each in ("held", "before")])
        running = [asyncio.create_task(lead(one, resigns))]
        await until(lambda: terms)
        running.append(asyncio.create_task(lead(two, stop)))
        running.append(asyncio.create_task(two.queue(name).consume(handle, concurrency=3, stop=stop)))
        await until(lambda: handled["before"] and count(others, StandingBy))

        passwords.replace(NEW)
        await asyncio.to_thread(set_password, server, NEW)
        renewed = count(events, Renewed)
        await until(lambda: count(events, Renewed) > renewed + 1)
        await until(lambda: is_sent(queue))
        await until(lambda: handled["after"])
        goes_on.set()
        await until(lambda: handled["held"])
        terms[0].check()
        assert not count(events, TermEnding)
        resigns.set()
        await until(lambda: len(terms) > 1)
        stop.set()
        await asyncio.gather(*running)
        stats = await queue.stats()
        assert (stats.ready, stats.locked, stats.dead) == (0, 0, 0)
    assert handled == Counter(["held", "before", "after"])
    assert terms[1].token > terms[0].token
    assert not count(others, LockEnded)


def count(events: list[Event], kind: type[Event]) -> int:
    return sum(type(event) is kind for event in events)


async def is_sent(queue: tenure.Queue) -> bool:
    try:
        await queue.send(b"x", id="after")
    except tenure.Unavailable:  # its connection was being closed
        return False
    return True


# --- refused ---


@pytest.mark.parametrize("form", ["function", "async function"])
async def test_a_password_that_is_refused_is_asked_for_once_more(worker: str, tmp_path: Path, form: str) -> None:
    """It was replaced between the answer and the login. The caller notices nothing, at the first login either."""
    passwords = Passwords(tmp_path, NEW, OLD)
    async with passwords.by(form, worker) as backend:
        assert await backend.leaders() is not None
    assert passwords.asked == 2


@pytest.mark.parametrize("form", FORMS)
async def test_a_wrong_password_names_its_source(worker: str, tmp_path: Path, form: str) -> None:
    passwords = Passwords(tmp_path, NEW)
    async with passwords.by(form, worker) as backend:
        with pytest.raises(tenure.ConfigError, match=r"refused the login: .*uthorization Violation") as refused:
            await backend.leaders()
    said = str(refused.value)
    assert f"; check what {FORMS[form]}" in said
    assert said.endswith("gives, and the user")
    assert NEW not in said
    assert passwords.asked == (0 if form.startswith("password") else 2)


async def test_a_password_that_is_wrong_for_a_while_is_unavailable(server: Nats, worker: str, tmp_path: Path) -> None:
    passwords = Passwords(tmp_path, OLD)
    async with passwords.by("function", worker) as backend:
        await backend.leaders()
        await asyncio.to_thread(set_password, server, NEW)

        async def is_refused() -> bool:
            with pytest.raises(tenure.Unavailable) as refused:
                await backend.leaders()
            return "check what credentials= gives, and the user (it worked before" in str(refused.value)

        await until(is_refused)
        passwords.replace(NEW)
        assert await backend.leaders() is not None


async def test_a_slow_source_is_named_while_it_is_waited_for(worker: str) -> None:
    goes_on = asyncio.Event()

    async def ask() -> str:
        await goes_on.wait()
        return OLD

    async with tenure.connect(f"{worker}?timeout=0.1", credentials=ask) as backend:
        with pytest.raises(tenure.Unavailable, match=r"credentials= gave no password within 0\.1 s"):
            await backend.leaders()
        goes_on.set()
        await until(lambda: answers(backend))


async def answers(backend: tenure.Backend) -> bool:
    try:
        return await backend.leaders() is not None
    except tenure.Unavailable:  # a busy machine
        return False


# --- two logins ---


@pytest.mark.parametrize(
    ("login", "more", "named"),
    [
        ("worker:hush@", "password_file=FILE", "a password and password_file="),
        ("worker:hush@", "password_command=true", "a password and password_command="),
        ("worker:hush@", "", "a password and credentials="),
        ("worker@", "password_file=FILE", "password_file= and credentials="),
        ("worker@", "password_file=FILE&password_command=true", "password_file= and password_command="),
        ("", "creds=FILE", "creds= and credentials="),
        ("", "nkey=FILE", "nkey= and credentials="),
        ("", "creds=FILE&password_file=FILE", "creds= and password_file="),
        ("", "nkey=FILE&password_command=true", "nkey= and password_command="),
    ],
)
async def test_two_logins_are_refused_by_name(passwords: Passwords, login: str, more: str, named: str) -> None:
    url = f"nats://{login}127.0.0.1:1/?{more.replace('FILE', str(passwords.file))}"
    backend = tenure.connect(url, credentials=passwords.ask if "credentials=" in named else None)
    with pytest.raises(tenure.ConfigError, match=f"^nats://127.0.0.1:1 is given {named}; leave out all but one$"):
        await backend.open()


@pytest.mark.parametrize("url", ["nats://worker@127.0.0.1:1", "nats://worker:@127.0.0.1:1"])
async def test_without_a_source_a_lone_word_before_the_host_is_no_user(url: str) -> None:
    has_source = address_of(Url.parse(url), has_source=True)
    assert (has_source.username, has_source.password, has_source.token) == ("worker", None, None)
    if ":@" in url:
        with pytest.raises(tenure.ConfigError, match="has a user, but no password"):
            address_of(Url.parse(url))
    else:
        assert address_of(Url.parse(url)).token == tenure.Secret("worker")


# --- over ---


ISSUER = Identity.new(nkeys.PREFIX_BYTE_ACCOUNT)


@pytest.fixture(scope="module")
def with_callout() -> Iterator[Nats]:
    """A server that asks a program, the user *judge* of an account of its own, who is let in, and until when."""
    options = {
        "accounts": {"APP": {"jetstream": "enabled"}, "AUTH": {"users": [{"user": "judge", "password": "j"}]}},
        "authorization": {"auth_callout": {"issuer": ISSUER.name, "auth_users": ["judge"], "account": "AUTH"}},
    }
    with private(Nats, options=options) as server:
        if server.version < (2, 10, 0):
            pytest.skip("it knows no auth_callout before 2.10")
        yield server


@asynccontextmanager
async def judging(server: Nats, ends_in: dict[str, int | None]) -> AsyncIterator[list[str]]:
    """Let in who shows one of these tokens, for as many seconds; yield the tokens that are shown."""
    shown: list[str] = []

    async def judge(request: Msg) -> None:
        facts = json.loads(base64.urlsafe_b64decode(request.data.split(b".")[1] + b"=="))["nats"]
        shown.append(facts["connect_opts"]["auth_token"])
        lasts = ends_in[shown[-1]]
        limits = dict.fromkeys(("subs", "data", "payload"), -1)
        end = {} if lasts is None else {"exp": int(time.time()) + lasts}
        user = ISSUER.issue(facts["user_nkey"], {"type": "user", "pub": {}, "sub": {}, **limits}, aud="APP", **end)
        answer = {"type": "authorization_response", "jwt": user}
        await request.respond(ISSUER.issue(facts["user_nkey"], answer, aud=facts["server_id"]["id"]).encode())

    judged = await nats.connect(server.url_as("judge:j@"))
    try:
        await judged.subscribe("$SYS.REQ.USER.AUTH", cb=judge)
        await judged.flush()
        yield shown
    finally:
        await judged.close()


async def test_a_login_that_is_over_is_used_for_no_further_connection(with_callout: Nats, name: str) -> None:
    """The server ends the connection. The next one asks anew, although the login was to last for an hour."""
    tokens = iter(["short", "long"])
    events: list[Event] = []
    terms: list[tenure.Term] = []
    stop = asyncio.Event()

    async def work(term: tenure.Term) -> None:
        terms.append(term)
        await stop.wait()

    def ask() -> tenure.Credentials:
        return tenure.Credentials(next(tokens), lasts=3_600)

    url = patient(with_callout.url_as())
    async with (
        judging(with_callout, {"short": 2, "long": None}) as shown,
        tenure.connect(url, credentials=ask, on_event=events.append) as backend,
    ):
        election = backend.election(name, ttl=TTL, renew_every=RENEW_EVERY, retry_every=RENEW_EVERY)
        running = asyncio.create_task(election.run(work, stop=stop))
        await until(lambda: shown == ["short", "long"])
        renewed = count(events, Renewed)
        await until(lambda: count(events, Renewed) > renewed + 1)
        stop.set()
        await running
    assert shown == ["short", "long"]
    assert len(terms) == 1
    missed = [event for event in events if isinstance(event, RenewalMissed)]
    assert all("uthentication expired" in event.why for event in missed), missed
