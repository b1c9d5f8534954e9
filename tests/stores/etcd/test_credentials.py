"""Logins at etcd by a password that isn't in the URL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

import tenure
from tenure.events import Event, StandingBy
from tests.durations import until
from tests.servers import Etcd, patient, private
from tests.stores.sources import WAYS, Answers, Way, a_file
from tests.stores.users import PASSWORDS, OfEtcd

USER, PASSWORD = "first", PASSWORDS["first"]
REFUSED = "refused the login: .*; check what {} gives, and the user"


@pytest.fixture(scope="module")
def users() -> Iterator[OfEtcd]:
    """Yield the users of a server that requires a login."""

    async def prepare(users: OfEtcd) -> None:
        await users.prepare()
        await users.add(USER)

    with private(Etcd) as server:
        found = OfEtcd(server)
        asyncio.run(prepare(found))
        yield found


def url_of(users: OfEtcd, option: str = "", login: str = f"{USER}@") -> str:
    return patient(f"etcd://{login}127.0.0.1:{users.server.port}/?{option}".rstrip("?"))


@pytest.mark.parametrize("way", WAYS)
async def test_each_source_lets_in(users: OfEtcd, tmp_path: Path, way: Way) -> None:
    given = way(tmp_path, USER, PASSWORD)
    async with tenure.connect(url_of(users, given.option, given.login), credentials=given.ask) as backend:
        async with backend.election(way.__name__, ttl=60).campaign() as term:
            leader = await backend.election(way.__name__).leader()
            assert leader is not None
            assert leader.token == term.token
        assert "etcd-no-login" not in [fact.code for fact in (await backend.diagnose()).facts if fact.advice]


async def test_a_password_that_is_refused_at_first_is_asked_for_once_more(users: OfEtcd) -> None:
    ask = Answers("wrong", PASSWORD)
    async with tenure.connect(url_of(users), credentials=ask) as backend:
        await backend.leaders()
        assert ask.given == ["wrong", PASSWORD]
        await users.replace(USER, PASSWORD)  # this ends the token
        ask.next = ["another wrong one", PASSWORD]
        await backend.leaders()
        assert ask.given[2:] == ["another wrong one", PASSWORD]


async def test_a_wrong_password_names_its_source(users: OfEtcd, tmp_path: Path) -> None:
    ask = Answers("wrong")
    async with tenure.connect(url_of(users), credentials=ask) as backend:
        with pytest.raises(tenure.ConfigError, match=REFUSED.format("credentials=")):
            await backend.leaders()
        assert ask.given == ["wrong", "wrong"]
    option = a_file(tmp_path, USER, "wrong").option
    async with tenure.connect(url_of(users, option)) as backend:
        with pytest.raises(tenure.ConfigError, match=REFUSED.format(option)):
            await backend.leaders()
        a_file(tmp_path, USER, PASSWORD)
        await backend.leaders()
        await users.replace(USER, "hush4next")
        try:
            with pytest.raises(tenure.Unavailable, match=f"{REFUSED.format(option)} .it worked before"):
                await backend.leaders()
            a_file(tmp_path, USER, "hush4next")
            await backend.leaders()
        finally:
            await users.replace(USER, PASSWORD)


async def test_the_watch_logs_in_with_the_newest_password(users: OfEtcd) -> None:
    """Nothing else wakes a candidate that asks again only after minutes."""
    user, ask = "second", Answers(PASSWORDS["second"])
    await users.add(user)
    terms, events, stop = list[int](), list[Event](), asyncio.Event()

    async def work(term: tenure.Term) -> None:
        terms.append(term.token)
        stop.set()

    async with (
        tenure.connect(url_of(users, login=f"{user}@"), credentials=ask, on_event=events.append) as backend,
        tenure.connect(url_of(users), credentials=lambda: PASSWORD) as other,
    ):
        async with other.election("hinted", ttl=600).campaign() as held:
            following = asyncio.create_task(backend.election("hinted", ttl=600, retry_every=150).run(work, stop=stop))
            await until(lambda: any(isinstance(event, StandingBy) for event in events))
            ask.next = ["hush4next"]
            await users.replace(user, "hush4next")
            await asyncio.to_thread(users.server.stop)  # a watch goes on with the login that it has begun with
            await asyncio.to_thread(users.server.start)
            await until(lambda: ask.given[-1] == "hush4next")
        await following
        assert terms[0] > held.token
    await users.remove(user)


async def test_a_source_that_has_no_user_or_no_password_is_told(users: OfEtcd) -> None:
    async with tenure.connect(url_of(users, login=""), credentials=lambda: PASSWORD) as backend:
        with pytest.raises(tenure.ConfigError, match="credentials= gives a password without a user"):
            await backend.leaders()
    async with tenure.connect(url_of(users, "password_command=false")) as backend:
        with pytest.raises(tenure.Unavailable, match="the password command 'false' ended with status 1"):
            await backend.leaders()


@pytest.mark.parametrize(
    ("login", "options", "given", "says"),
    [
        (f"{USER}:hush@", "", True, "is given a password and credentials="),
        (f"{USER}:hush@", "password_file=FILE", False, "is given a password and password_file="),
        (f"{USER}:hush@", "password_command=echo", False, "is given a password and password_command="),
        (f"{USER}@", "password_file=FILE&password_command=echo", False, "password_file= and password_command="),
        (f"{USER}@", "password_file=FILE", True, "password_file= and credentials="),
        (f"{USER}@", "", False, "not both a user and a password before it"),
        ("@", "password_command=echo", False, "not both a user and a password before it"),
    ],
)
async def test_two_passwords_and_none_are_refused_by_name(
    tmp_path: Path, login: str, options: str, given: bool, says: str
) -> None:
    a_file(tmp_path, USER, "hush")
    url = f"etcd://{login}127.0.0.1:1/?{options.replace('FILE', str(tmp_path / 'password'))}".rstrip("?")
    with pytest.raises(tenure.ConfigError, match=says) as refusal:
        async with tenure.connect(url, credentials=Answers("hush") if given else None):
            pass
    assert "hush" not in str(refusal.value)
