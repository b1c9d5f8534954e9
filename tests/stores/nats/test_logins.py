"""Logins at NATS by files: the seed of an NKey, and credentials with a JWT, as a server with an operator wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nkeys
import pytest

from tenure._backends import nats
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tests.servers import Nats, private
from tests.stores.nats.identities import Identity

UNLIMITED = -1


def credentials(jwt: str, seed: str, end: str = "\n") -> str:
    """Return the content of a file as ``nsc generate creds`` writes it."""
    lines = [
        "-----BEGIN NATS USER JWT-----",
        jwt,
        "------END NATS USER JWT------",
        "",
        "************************* IMPORTANT *************************",
        "NKEY Seed printed below can be used to sign and prove identity.",
        "",
        "-----BEGIN USER NKEY SEED-----",
        seed,
        "------END USER NKEY SEED------",
    ]
    return end.join(lines) + end


USER, OTHER, STRANGER = (Identity.new(nkeys.PREFIX_BYTE_USER) for _ in range(3))
OPERATOR = Identity.new(nkeys.PREFIX_BYTE_OPERATOR)
ACCOUNT, SYSTEM = Identity.new(nkeys.PREFIX_BYTE_ACCOUNT), Identity.new(nkeys.PREFIX_BYTE_ACCOUNT)


@pytest.fixture(scope="module")
def with_keys() -> Iterator[Nats]:
    """A server that knows two users by their NKeys."""
    with private(Nats, options={"authorization": {"users": [{"nkey": USER.name}, {"nkey": OTHER.name}]}}) as server:
        yield server


@pytest.fixture(scope="module")
def with_operator() -> Iterator[Nats]:
    """A server that trusts an operator, and has one account, with JetStream."""
    limits = ("mem_storage", "disk_storage", "streams", "consumer", "subs", "data", "payload", "conn", "imports")
    account = OPERATOR.issue(
        ACCOUNT,
        {"type": "account", "limits": dict.fromkeys((*limits, "exports", "leaf"), UNLIMITED) | {"wildcards": True}},
    )
    trusted = {
        "operator": OPERATOR.issue(OPERATOR, {"type": "operator"}),
        "resolver": "MEMORY",
        "system_account": SYSTEM.name,
        "resolver_preload": {ACCOUNT.name: account, SYSTEM.name: OPERATOR.issue(SYSTEM, {"type": "account"})},
    }
    with private(Nats, options=trusted) as server:
        yield server


def user_jwt(user: Identity = USER) -> str:
    limits = dict.fromkeys(("subs", "data", "payload"), UNLIMITED)
    return ACCOUNT.issue(user, {"type": "user", "pub": {}, "sub": {}, **limits})


@asynccontextmanager
async def opened(server: Nats, option: str, path: Path) -> AsyncIterator[nats.NatsBackend]:
    backend = nats.open(Url.parse(f"nats://127.0.0.1:{server.port}/?{option}={path}"))
    try:
        yield backend
    finally:
        await backend.close()


async def login_shown(backend: nats.NatsBackend) -> str:
    [fact] = [one for one in await backend.describe() if one.name == "login"]
    return fact.value


async def test_a_login_by_the_seed_of_an_nkey(with_keys: Nats, tmp_path: Path) -> None:
    file = tmp_path / "user.nk"
    file.write_text(f"{USER.seed}\n")
    async with opened(with_keys, "nkey", file) as backend:
        assert await backend.leases.names() is not None
        assert await login_shown(backend) == "an nkey"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_a_login_by_credentials(with_operator: Nats, tmp_path: Path, end: str) -> None:
    file = tmp_path / "user.creds"
    file.write_text(credentials(user_jwt(), USER.seed, end), newline="")
    async with opened(with_operator, "creds", file) as backend:
        assert await backend.leases.names() is not None
        assert await login_shown(backend) == "a creds file"


async def test_the_login_of_another_is_refused(with_keys: Nats, with_operator: Nats, tmp_path: Path) -> None:
    file = tmp_path / "login"
    file.write_text(STRANGER.seed)
    async with opened(with_keys, "nkey", file) as backend:
        with pytest.raises(ConfigError, match="refused the login"):
            await backend.leases.names()
    file.write_text(credentials(user_jwt(), STRANGER.seed))
    async with opened(with_operator, "creds", file) as backend:
        with pytest.raises(ConfigError, match="refused the login"):
            await backend.leases.names()


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("nkey", b"", "no seed of a user"),
        ("nkey", b"hello\n", "no seed of a user"),
        ("nkey", ACCOUNT.seed.encode(), "no seed of a user"),
        ("nkey", b"\xff\x00", "no text"),
        ("creds", USER.seed.encode(), "no line after -----BEGIN NATS USER JWT-----"),
        ("creds", credentials("x.y.z", "").encode(), "no line after -----BEGIN USER NKEY SEED-----"),
        ("creds", b"-----BEGIN NATS USER JWT-----", "no line after -----BEGIN NATS USER JWT-----"),
        ("creds", credentials("x.y.z", ACCOUNT.seed).encode(), "no seed of a user"),
    ],
    ids=["empty", "a word", "of an account", "binary", "only a seed", "no seed", "only a mark", "seed of an account"],
)
async def test_a_file_without_a_login_is_refused(
    with_keys: Nats, tmp_path: Path, option: str, content: bytes, message: str
) -> None:
    file = tmp_path / "login"
    file.write_bytes(content)
    async with opened(with_keys, option, file) as backend:
        with pytest.raises(ConfigError, match=message) as refused:
            await backend.leases.names()
    assert f"{option}={file}" in str(refused.value)
    assert USER.seed not in str(refused.value)


async def logged_in(server: Nats) -> list[str]:
    """Return the public keys that are connected to *server*."""
    found = await asyncio.to_thread(server.asked, "connz?auth=1")
    return [str(one.get("authorized_user") or one.get("nkey")) for one in found["connections"]]


@pytest.mark.parametrize("option", ["nkey", "creds"])
async def test_a_file_that_is_exchanged_is_read_for_the_next_connection(
    with_keys: Nats, with_operator: Nats, tmp_path: Path, option: str
) -> None:
    """In the end, it has the key of another user, and a JWT for it: this one is logged in."""
    server = {"nkey": with_keys, "creds": with_operator}[option]

    def login(user: Identity) -> str:
        return user.seed if option == "nkey" else credentials(user_jwt(user), user.seed)

    file = tmp_path / "login"
    file.write_text(login(USER))
    half = "no seed of a user" if option == "nkey" else "no line after -----BEGIN NATS USER JWT-----"
    async with opened(server, option, file) as backend:
        await backend.leases.names()
        assert await logged_in(server) == [USER.name]
        for content, message in ((None, "can't be read"), ("half", half)):
            server.kill()
            server.start()
            file.unlink()
            if content is not None:
                file.write_text(content)

            async def is_refused(message: str = message) -> bool:
                with pytest.raises(Unavailable) as refused:  # it worked before: somebody is exchanging the file
                    await backend.leases.names()
                return message in str(refused.value)

            await until(is_refused)
            file.write_text(login(OTHER))
            await backend.leases.names()
            assert await logged_in(server) == [OTHER.name]
