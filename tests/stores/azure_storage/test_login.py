"""Logins that change: each request is signed by the newest, and one that is refused for its login is signed anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("azure.storage.blob")

from azure.storage.blob import AccountSasPermissions, ResourceTypes, Services, generate_account_sas

import tenure
from tenure._backends.azure_storage.login import SigningPolicy, kind_of
from tenure._logins import Login
from tenure._secret import Secret
from tenure.errors import ConfigError, Unavailable
from tests.durations import stretched, until
from tests.servers import Azurite, patient, private
from tests.servers.azurite import ACCOUNT

KEYS = [f"hush{number:04}keys" for number in range(8)]
ALL = dict.fromkeys(["read", "write", "delete", "list", "add", "create", "update", "process"], True)


def signature(key: str, lasts: float = 3_600.0) -> str:
    """Return a signature with all rights, by *key*."""
    now = datetime.now(UTC)
    rights, kinds = AccountSasPermissions(**ALL), ResourceTypes(service=True, container=True, object=True)
    both = Services(blob=True, queue=True)
    return generate_account_sas(
        ACCOUNT, key, kinds, rights, now + timedelta(seconds=lasts), start=now - timedelta(hours=1), services=both
    )


@pytest.fixture(scope="module")
def started() -> Iterator[Azurite]:
    server = private(Azurite, key=KEYS[0])
    yield server
    server.close()


@pytest.fixture
def server(started: Azurite) -> Azurite:
    started.accept(KEYS[0])
    return started


class Vault:
    """Has the newest login."""

    def __init__(self, login: str | tenure.Credentials) -> None:
        self.login = login
        self.asked = 0

    def credentials(self) -> str | tenure.Credentials:
        self.asked += 1
        return self.login


async def test_a_signature_that_has_ended_is_replaced_at_the_first_refusal(server: Azurite, name: str) -> None:
    vault = Vault(signature(KEYS[0], stretched(2.0)))
    async with tenure.connect(patient(server.url), credentials=vault.credentials) as backend:
        queue = backend.queue(name[-40:])
        await queue.send(b"before")
        assert vault.asked == 1
        vault.login = signature(KEYS[0])

        async def is_replaced() -> bool:
            await queue.send(b"more")
            return vault.asked == 2

        await until(is_replaced)
        await queue.send(b"after")
        assert vault.asked == 2
        assert (await queue.stats()).ready >= 3


async def test_a_login_that_lasts_is_replaced_before_it_ends(server: Azurite, name: str) -> None:
    vault = Vault(tenure.Credentials(signature(KEYS[0]), lasts=stretched(1.0)))
    async with tenure.connect(patient(server.url), credentials=vault.credentials) as backend:
        await backend.queue(name[-40:]).send(b"x")

        async def is_asked_again() -> bool:
            await backend.leaders()
            return vault.asked > 2

        await until(is_asked_again)


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_only_the_refused_request_of_several_is_sent_anew(
    server: Azurite, name: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An acquisition has several requests. The key is replaced before one of them."""
    vault, passed = Vault(KEYS[0]), list[str]()
    pass_on = SigningPolicy._pass_on
    is_begun = asyncio.Event()

    async def counted(policy: SigningPolicy, request: Any, login: Login) -> Any:
        if is_begun.is_set():
            passed.append(f"{request.http_request.method} {request.http_request.url.partition('?')[2]}")
            if len(passed) == number:
                server.accept(KEYS[1])
                vault.login = KEYS[1]
        return await pass_on(policy, request, login)

    monkeypatch.setattr(SigningPolicy, "_pass_on", counted)
    async with tenure.connect(patient(server.url), credentials=vault.credentials) as backend:
        await backend.leaders()
        is_begun.set()
        stop, tokens = asyncio.Event(), list[int]()

        async def work(term: tenure.Term) -> None:
            tokens.append(term.token)
            stop.set()

        await backend.election(name, ttl=60).run(work, stop=stop)
    assert len(tokens) == 1
    assert vault.asked == 2
    assert passed[number - 1] == passed[number]


@pytest.mark.parametrize("before", ["key", "signature"])
async def test_a_key_may_be_followed_by_a_signature_and_the_other_way_round(
    server: Azurite, name: str, before: str
) -> None:
    logins = [KEYS[0], signature(KEYS[1])] if before == "key" else [signature(KEYS[0]), KEYS[1]]
    vault = Vault(logins[0])
    async with tenure.connect(patient(server.url), credentials=vault.credentials) as backend:
        queue = backend.queue(name[-40:])
        await queue.send(b"x")
        vault.login = logins[1]
        server.accept(KEYS[1])
        with pytest.raises(
            Unavailable, match=r"(has changed from a key to a signature, or back; ask again|refused the login)"
        ):
            await queue.stats()
        assert (await queue.stats()).ready == 1


async def test_many_requests_that_are_refused_together_ask_once(server: Azurite, name: str) -> None:
    vault = Vault(KEYS[0])
    async with tenure.connect(patient(server.url), credentials=vault.credentials) as backend:
        queue = backend.queue(name[-40:])
        await queue.send(b"x")
        server.accept(KEYS[1])
        vault.login = KEYS[1]
        await queue.send_batch([tenure.Outgoing(b"x") for _ in range(30)])
        assert vault.asked == 2
        assert (await queue.stats()).ready == 31


async def test_a_login_that_stays_wrong_is_refused_in_words(
    server: Azurite, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = signature(KEYS[5])
    async with tenure.connect(patient(server.url), credentials=lambda: wrong) as backend:
        with pytest.raises(
            ConfigError, match=r"refused the login: AuthenticationFailed; check the key or the sig"
        ) as at:
            await backend.queue(name[-40:]).stats()
    [secret] = [part for part in wrong.split("&") if part.startswith("sig=")]
    assert secret[4:] not in f"{at.value!r} {at.value.__cause__!r} {caplog.text}"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("hello", r"credentials= gives neither an account key, which is base64, nor a shared access signature"),
        ("sig=", r"credentials= gives neither an account key"),
        ("sv=2&sig=a b", r"credentials= gives neither an account key"),
        ("https://a.blob.core.windows.net/?sv=1&sig=abc", r"; it is a whole URL: copy what follows its \?"),
        ("AccountName=a;AccountKey=aHVzaA==", r"; it is a connection string: copy its AccountKey alone"),
        (
            tenure.Credentials(KEYS[0], user="me"),
            r"credentials= gives a user, and an account has none; leave user= out",
        ),
    ],
)
async def test_what_is_no_login_of_an_account_is_refused(
    server: Azurite, name: str, found: str | tenure.Credentials, says: str
) -> None:
    async with tenure.connect(patient(server.url), credentials=lambda: found) as backend:
        with pytest.raises(ConfigError, match=says):
            await backend.queue(name[-40:]).stats()


@pytest.mark.parametrize(
    ("query", "says"),
    [
        (
            "key_env=HOME&",
            r"is given key_env= beside credentials=, password_file= or password_command=; leave",
        ),
        ("sas_env=HOME&", r"is given sas_env= beside credentials="),
        ("sv=1&sig=x&", r"is given a signature beside credentials="),
    ],
)
async def test_two_logins_are_refused(tmp_path: Path, query: str, says: str) -> None:
    path = tmp_path / "key"
    path.write_text(KEYS[0])
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=says):
        async with tenure.connect(f"azure://account?{query}password_file={path}"):
            pass


async def test_a_slow_answer_gives_up_no_login(server: Azurite, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are replaced, and the login goes on to be used: its source may be away."""
    vault, is_slow = Vault(KEYS[0]), asyncio.Event()
    pass_on = SigningPolicy._pass_on

    async def slowly(policy: SigningPolicy, request: Any, login: Login) -> Any:
        if is_slow.is_set():
            await asyncio.Event().wait()
        return await pass_on(policy, request, login)

    monkeypatch.setattr(SigningPolicy, "_pass_on", slowly)
    async with tenure.connect(f"{server.url}&timeout={stretched(1.0):g}", credentials=vault.credentials) as backend:
        queue = backend.queue(name[-40:])
        await queue.send(b"x")
        is_slow.set()
        with pytest.raises(Unavailable, match="no answer within"):
            await queue.stats()
        is_slow.clear()
        assert (await queue.stats()).ready == 1
        assert vault.asked == 1


async def test_many_that_wait_for_a_source_that_fails_ask_once(server: Azurite, name: str) -> None:
    asked = 0

    def ask() -> str:
        nonlocal asked
        asked += 1
        raise LookupError("the vault is sealed")

    async with tenure.connect(patient(server.url), credentials=ask) as backend:
        queue = backend.queue(name[-40:])
        found = await asyncio.gather(*(queue.stats() for _ in range(8)), return_exceptions=True)
    assert all("credentials= failed: LookupError: the vault is sealed" in str(one) for one in found)
    assert asked == 1


async def test_a_source_that_is_slow_is_told_as_such(server: Azurite, name: str) -> None:
    async def ask() -> str:
        await asyncio.Event().wait()
        return ""

    async with tenure.connect(f"{server.url}&timeout=0.2", credentials=ask) as backend:
        with pytest.raises(Unavailable, match=r"credentials= gave no password within 0.2 s"):
            await backend.queue(name[-40:]).stats()


@pytest.mark.parametrize("host", ["8.8.8.8", "azurite.example.com"])
async def test_a_login_goes_over_a_private_network_only_without_tls(host: str) -> None:
    with pytest.raises(ConfigError, match="is asked without TLS, and anybody on the way could read a signature"):
        async with tenure.connect(f"azurite://{host}:10000", credentials=lambda: KEYS[0]):
            pass


async def test_a_file_is_read_anew_when_its_key_is_refused(server: Azurite, name: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEYS[0]}\n")
    path.chmod(0o600)
    async with tenure.connect(patient(f"{server.url}&password_file={path}")) as backend:
        queue = backend.queue(name[-40:])
        await queue.send(b"x")
        path.write_text(f"{KEYS[1]}\n")
        server.accept(KEYS[1])
        await queue.send(b"x")
        assert (await queue.stats()).ready == 2


def test_kinds_of_logins() -> None:
    assert kind_of(Secret(KEYS[0])) == "account key"
    assert kind_of(Secret("?" + signature(KEYS[0]))) == kind_of(Secret("sig=x%3D")) == "shared access signature"
    for text in ("", "hush", "sig=", "sv=1#sig=x", "a&b", "hush\n", "??sig=x", "https://a/?sig=x", "sv=1&&sig=x"):
        assert kind_of(Secret(text)) is None
