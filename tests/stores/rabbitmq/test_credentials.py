"""RabbitMQ: passwords and tokens that are asked for, and replaced while connections are open."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("aiormq")

import aiormq
from aiormq import spec

import tenure
from tenure import _logins
from tenure._backends.rabbitmq import login_renewal
from tenure._backends.rabbitmq.address import LOGIN_MAX, address_of
from tenure._backends.rabbitmq.client import translate
from tenure._backends.rabbitmq.errors import ChannelLost, ConnectionLost
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tests.durations import until
from tests.explained import facts_by_name
from tests.servers import RabbitMQ, patient, private
from tests.servers.rabbitmq import US
from tests.servers.turned_process import CAN_TURN

PASSWORD, OTHER = "hush4first", "hush4second"
KEY = b"a key of HS256, of 32 bytes only"
SOURCES = ["function", "async function", "function with the user", "password_file", "password_command"]


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQ]:
    """A server with a user ``ann``, which takes tokens, too."""
    jwk = f'#{{<<"kty">> => <<"oct">>, <<"alg">> => <<"HS256">>, <<"k">> => <<"{encoded(KEY)}">>}}'
    with private(RabbitMQ, plugins=("rabbitmq_auth_backend_oauth2",)) as own:
        own.order(f'rabbit_auth_backend_internal:add_user(<<"ann">>, <<"{PASSWORD}">>, {US})')
        own.permit("ann")
        own.order('application:set_env(rabbitmq_auth_backend_oauth2, resource_server_id, <<"rabbitmq">>)')
        keys = f'[{{signing_keys, #{{<<"one">> => {{map, {jwk}}}}}}}]'
        own.order(f"application:set_env(rabbitmq_auth_backend_oauth2, key_config, {keys})")
        backends = "[rabbit_auth_backend_oauth2, rabbit_auth_backend_internal]"
        own.order(f"application:set_env(rabbit, auth_backends, {backends})")
        yield own


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No password may be logged, by the driver either; nor a token."""
    caplog.set_level(logging.DEBUG)
    yield
    said = "\n".join(record.getMessage() for record in caplog.get_records("call"))
    assert [one for one in (PASSWORD, OTHER, "eyJ") if one in said] == []


@contextmanager
def with_password(server: RabbitMQ, password: str) -> Iterator[None]:
    """Let ``ann`` have another password."""
    change_password(server, password)
    try:
        yield
    finally:
        change_password(server, PASSWORD)


def change_password(server: RabbitMQ, password: str) -> None:
    server.order(f'rabbit_auth_backend_internal:change_password(<<"ann">>, <<"{password}">>, {US})')


def url_of(server: RabbitMQ, login: str = "ann", **options: str) -> str:
    at = f"{login}@" if login else ""
    query = "".join(f"&{name}={quote(value, safe='')}" for name, value in options.items())
    return patient(f"amqp://{at}127.0.0.1:{server.port}/?heartbeat=60{query}")


def source(server: RabbitMQ, kind: str, password: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return a URL and what is given with it, by which the *password* comes from a *kind* of source."""

    async def ask() -> str:
        return password

    match kind:
        case "function":
            return url_of(server), {"credentials": lambda: password}
        case "async function":
            return url_of(server), {"credentials": ask}
        case "function with the user":
            return url_of(server, ""), {"credentials": lambda: tenure.Credentials(password, user="ann")}
        case "password_file":
            file = folder / "password"
            file.write_text(f"{password}\n")
            file.chmod(0o600)
            return url_of(server, password_file=str(file)), {}
    return url_of(server, password_command=f"echo {shlex.quote(password)}"), {}


def name_of(kind: str) -> str:
    """Return how messages name a *kind* of source."""
    names = {"password_file": r"password_file=\S+/password", "password_command": "the password command 'echo'"}
    return names.get(kind, "credentials=")


def store_of(backend: tenure.Backend) -> Any:
    return backend._connection.opened


async def login_of(backend: tenure.Backend) -> str:
    """Return what ``tenure doctor`` says of the login."""
    return facts_by_name(await store_of(backend).describe())["login"].value


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_password_that_is_asked_for_lets_in(server: RabbitMQ, kind: str, tmp_path: Path, name: str) -> None:
    url, given = source(server, kind, PASSWORD, tmp_path)
    async with tenure.connect(url, **given) as backend:
        queue = backend.queue(name[-40:])
        await queue.send(b"x")
        [message] = await queue.receive(wait=20)
        await message.complete()
        login = await login_of(backend)
    assert login.startswith("ann; the password is that of ")
    assert name_of(kind).split("=")[0] in login


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_wrong_password_names_where_it_is_from(server: RabbitMQ, kind: str, tmp_path: Path) -> None:
    url, given = source(server, kind, OTHER, tmp_path)
    async with tenure.connect(url, **given) as backend:
        with pytest.raises(
            ConfigError, match=rf"refused the login: .*; check what {name_of(kind)} gives, and the user"
        ):
            await backend.queue("orders").send(b"x")


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_password_that_is_too_long_names_where_it_is_from(server: RabbitMQ, kind: str, tmp_path: Path) -> None:
    url, given = source(server, kind, "x" * LOGIN_MAX, tmp_path)
    async with tenure.connect(url, **given) as backend:
        expected = rf"user and password of {name_of(kind)} \(3,003 bytes\) must not be longer than 3,000 bytes"
        with pytest.raises(ConfigError, match=expected) as caught:
            await backend.queue("orders").send(b"x")
    assert "amqp://" not in str(caught.value)


async def test_a_source_that_fails_is_told_as_it_is(server: RabbitMQ) -> None:
    def ask() -> str:
        raise LookupError("the vault is sealed")

    async with tenure.connect(url_of(server), credentials=ask) as backend:
        with pytest.raises(Unavailable, match=r"^credentials= failed: LookupError: the vault is sealed$"):
            await backend.queue("orders").send(b"x")


async def test_two_passwords_are_refused_by_name(server: RabbitMQ, tmp_path: Path) -> None:
    url, _ = source(server, "password_file", PASSWORD, tmp_path)
    with pytest.raises(ConfigError, match=r"is given a password and password_file=; leave out all but one"):
        async with tenure.connect(url.replace("ann@", "ann:x@")):
            pass
    with pytest.raises(ConfigError, match=r"is given password_file= and credentials=; leave out all but one"):
        async with tenure.connect(url, credentials=lambda: PASSWORD):
            pass


async def test_a_password_without_a_user_is_not_that_of_guest(server: RabbitMQ) -> None:
    async with tenure.connect(url_of(server, ""), credentials=lambda: "guest") as backend:
        with pytest.raises(ConfigError, match=r"refused the login: .*; check what credentials= gives, and the user"):
            await backend.queue("orders").send(b"x")
    await until(lambda: "user '' - invalid credentials" in server.log())


async def test_a_password_that_is_replaced_just_then_is_asked_for_once_more(server: RabbitMQ, name: str) -> None:
    ask = Answers(OTHER, PASSWORD)
    async with tenure.connect(url_of(server), credentials=ask) as backend:
        await backend.queue(name[-40:]).settings()
    assert ask.left == [PASSWORD]


async def test_a_consumer_goes_on_when_the_password_was_replaced(server: RabbitMQ, tmp_path: Path, name: str) -> None:
    url, _ = source(server, "password_file", PASSWORD, tmp_path)
    handled: Counter[str] = Counter()
    stop, goes_on = asyncio.Event(), asyncio.Event()

    async def handle(message: tenure.Message) -> None:
        if message.id == "held":
            await goes_on.wait()
        handled[message.id] += 1

    async with tenure.connect(url) as backend:
        queue = backend.queue(name[-40:])
        consuming = asyncio.create_task(queue.consume(handle, concurrency=2, stop=stop))
        await queue.send_batch([tenure.Outgoing(b"x", id=one) for one in ("before", "held")])
        await until(lambda: handled["before"])
        with with_password(server, OTHER):
            server.close_connections("maintenance")
            said = await refusal(queue)
            assert "check what password_file=" in said
            assert OTHER not in said
            (tmp_path / "password").write_text(OTHER)
            await until(lambda: sent(queue, "again"))
            goes_on.set()
            await until(lambda: handled["held"] and handled["again"])
            await queue.send(b"x", id="after")
            await until(lambda: handled["after"])
            stop.set()
            await consuming
            assert await stats_of(queue) == (0, 0)
    assert handled.keys() == {"before", "held", "again", "after"}


async def refusal(queue: tenure.Queue) -> str:
    """Return why the server refuses to let this client in, once it does."""
    found: list[str] = []

    async def is_refused() -> bool:
        try:
            await queue.send(b"x", id="again")
        except Unavailable as error:
            found.append(str(error))
        return bool(found) and "refused the login" in found[-1]

    await until(is_refused)
    return found[-1]


async def sent(queue: tenure.Queue, id_: str) -> bool:
    try:
        await queue.send(b"x", id=id_)
    except Unavailable:
        return False
    return True


async def stats_of(queue: tenure.Queue) -> tuple[int, int]:
    stats = await queue.stats()
    return stats.ready, stats.dead


# --- connections that stay ---

LASTS = 30.0
"""Seconds of a first login, by which the server's clock is turned."""


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What open connections are given, with the server's consent; and soon, of what lasts for some seconds."""
    accepted: list[str] = []
    update = aiormq.Connection.update_secret

    async def note(self: aiormq.Connection, new_secret: str, **options: Any) -> spec.Connection.UpdateSecretOk:
        answer = await update(self, new_secret, **options)
        accepted.append(new_secret)
        return answer

    monkeypatch.setattr(aiormq.Connection, "update_secret", note)
    monkeypatch.setattr(_logins, "RENEWED_AT", 0.001)
    monkeypatch.setattr(_logins, "TRIED_AGAIN", 0.001)
    monkeypatch.setattr(login_renewal, "PAUSE", 0.01)
    return accepted


def connections(server: RabbitMQ) -> list[str]:
    """Return the connections of clients, as the server knows them."""
    return sorted(server.evaluate("rabbit_networking:connections()").strip("[]").split(","))


class Answers:
    """A function that gives one answer after the other, the last one again and again; an error is raised."""

    def __init__(self, *answers: tenure.Credentials | str | Exception) -> None:
        self.left = list(answers)

    def __call__(self) -> tenure.Credentials | str:
        answer = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def used(queue: tenure.Queue) -> None:
    """Use the connections that send and that receive."""
    await queue.send(b"x")
    [message] = await queue.receive(wait=20)
    await message.complete()


async def test_open_connections_get_the_next_password_before_the_end(
    server: RabbitMQ, name: str, secrets: list[str]
) -> None:
    """RabbitMQ accepts it, also without OAuth 2. A source that fails meanwhile costs nothing."""
    ask = Answers(tenure.Credentials(PASSWORD, lasts=LASTS))
    async with tenure.connect(url_of(server), credentials=ask) as backend:
        queue = backend.queue(name[-40:])
        await used(queue)
        await until(lambda: len(connections(server)) == 2)
        before = connections(server)
        ask.left = [LookupError("the vault is sealed"), tenure.Credentials(OTHER, lasts=1_000_000)]
        await until(lambda: len(secrets) == 2)
        await used(queue)
        assert connections(server) == before
        renewals = [task for task in everything(backend) if task.get_name() == "tenure-rabbitmq-login"]
        assert len(renewals) == 2
        server.close_connections("maintenance")
        await until(lambda: all(task.done() for task in renewals))
    assert secrets == [OTHER] * 2


def everything(backend: tenure.Backend) -> list[asyncio.Task[Any]]:
    """Return the tasks of the connections of a backend."""
    client = store_of(backend)._client
    return [task for connection in client._connections.values() for task in connection._tasks]


async def test_a_source_that_fails_is_not_asked_without_end(
    server: RabbitMQ, name: str, secrets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(login_renewal, "PAUSE", 1.0)
    monkeypatch.setattr(login_renewal, "asyncio", SimpleNamespace(sleep=sleep, timeout=asyncio.timeout))
    ask = Answers(tenure.Credentials(PASSWORD, lasts=0.01), LookupError("the vault is sealed"))
    async with tenure.connect(url_of(server), credentials=ask) as backend:
        await backend.queue(name[-40:]).settings()
        await until(lambda: len(slept) > 10)
    assert min(slept) >= 0.5
    assert max(slept[5:]) >= 2.5


# --- tokens of OAuth 2 ---


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(ends_at: float, *rights: str) -> str:
    """Return a token that the server accepts until then, by its wall clock, with all *rights* unless some are given."""
    scopes = [f"rabbitmq.{right}:*/*" for right in rights or ("configure", "write", "read")]
    claims = {"aud": ["rabbitmq"], "scope": scopes, "client_id": "worker", "exp": int(ends_at)}
    parts = ({"alg": "HS256", "typ": "JWT", "kid": "one"}, claims)
    signed = ".".join(encoded(json.dumps(part).encode()) for part in parts)
    return f"{signed}.{encoded(hmac.new(KEY, signed.encode(), hashlib.sha256).digest())}"


async def end(server: RabbitMQ, seconds: float) -> None:
    """Let tokens end that were good for some seconds."""
    if CAN_TURN:
        await asyncio.to_thread(server.turn, seconds + 2)
    else:
        await asyncio.sleep(seconds + 2)


async def test_connections_outlive_the_token_that_they_were_made_with(
    server: RabbitMQ, name: str, secrets: list[str]
) -> None:
    now = time.time() + server.ahead
    first, second = token(now + LASTS), token(now + 3_600)
    ask = Answers(tenure.Credentials(first, lasts=LASTS))
    async with (
        tenure.connect(url_of(server, ""), credentials=ask) as backend,
        tenure.connect(url_of(server, ""), credentials=lambda: first) as other,
    ):
        queue = backend.queue(name[-40:])
        await used(queue)
        await used(other.queue(f"{name[-40:]}-2"))
        assert (await login_of(backend)).startswith("the user of the token; ")
        await until(lambda: len(connections(server)) == 4)
        before = connections(server)
        ask.left = [tenure.Credentials(second, lasts=1_000_000)]
        await until(lambda: len(secrets) == 2)
        await end(server, LASTS)
        await used(queue)
        await backend.queue(f"{name[-40:]}-3").declare(max_deliveries=3)
        with pytest.raises(Unavailable, match=r"refused the login: .*token has expired.*check what credentials= gives"):
            await other.queue(f"{name[-40:]}-4").declare(max_deliveries=3)
        assert connections(server) == before
    assert secrets == [second] * 2


async def test_connections_outlive_a_token_whose_end_was_not_told(
    server: RabbitMQ, name: str, secrets: list[str], tmp_path: Path
) -> None:
    """One in a file. The server says that it has ended when it refuses a request for it."""
    now = time.time() + server.ahead
    first, second = token(now + LASTS), token(now + 3_600)
    url, _ = source(server, "password_file", first, tmp_path)
    async with tenure.connect(url) as backend:
        await used(backend.queue(name[-40:]))
        await until(lambda: len(connections(server)) == 2)
        before = connections(server)
        await end(server, LASTS)
        with pytest.raises(
            Unavailable, match=r"refused the login: .*token has expired.*check what password_file=\S+ gives"
        ):
            await asyncio.gather(*[backend.queue(f"{name[-40:]}-{number}").settings() for number in range(3)])
        (tmp_path / "password").write_text(second)
        await until(lambda: sent(backend.queue(name[-40:]), "after"))
        await used(backend.queue(name[-40:]))
        assert set(connections(server)) & set(before)
    assert second in secrets


async def test_a_token_that_the_server_refuses_costs_the_connection_only(
    server: RabbitMQ, name: str, secrets: list[str]
) -> None:
    ask = Answers(tenure.Credentials(token(time.time() + 3_600), lasts=LASTS))
    handled: list[str] = []
    stop = asyncio.Event()

    async def handle(message: tenure.Message) -> None:
        handled.append(message.id)

    async with tenure.connect(url_of(server, ""), credentials=ask) as backend:
        queue = backend.queue(name[-40:])
        consuming = asyncio.create_task(queue.consume(handle, stop=stop))
        await queue.send(b"x", id="before")
        await until(lambda: "before" in handled)
        nothing, another = "eyJ, or no token", token(time.time() + 3_700)
        ask.left = [tenure.Credentials(one, lasts=1_000_000) for one in (nothing, another)]
        await until(lambda: "Secret update was refused for user 'worker'" in server.log())
        await until(lambda: sent(queue, "after"))
        await until(lambda: "after" in handled)
        stop.set()
        await consuming
    assert ask.left == [tenure.Credentials(another, lasts=1_000_000)]
    assert nothing not in secrets


@pytest.mark.parametrize(
    "error",
    [
        ConnectionLost(403, "ACCESS_REFUSED - Login was refused"),
        ConnectionLost(530, "NOT_ALLOWED - New secret was refused by one of the backends"),
        ChannelLost(403, "ACCESS_REFUSED - … refused …, backend rabbit_auth_backend_oauth2 returned an error: …"),
    ],
    ids=["of a new connection", "its successor", "its end"],
)
def test_a_refusal_of_a_login_is_told_from_those_of_rights(error: Exception) -> None:
    url = Url.parse("amqp://h/")
    told = translate(error, url, address_of(url), 5.0, worked=True, user="", source="credentials=")
    assert isinstance(told, Unavailable)
    assert re.search("refused the login: .*; check what credentials= gives", str(told))


async def test_a_token_that_lacks_a_right_is_to_be_given_scopes(server: RabbitMQ, name: str) -> None:
    reads = token(time.time() + 3_600, "read")
    async with tenure.connect(url_of(server, ""), credentials=lambda: reads) as backend:
        with pytest.raises(ConfigError, match=r"; give the token the scopes to configure, write and read$"):
            await backend.queue(name[-40:]).declare(max_deliveries=3)
