"""Keys and signatures of a shared access policy that are replaced while a process runs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("azure.servicebus")
pytest.importorskip("proton")

import tenure
from tenure._backends.servicebus.login import Signer, check_login, signed
from tenure._logins import Login, Logins, PasswordOptions, logins_of
from tenure._secret import Secret
from tenure.errors import ConfigError
from tests.durations import stretched
from tests.servers import private
from tests.servers.servicebus import ServiceBus

KEY = "a" * 43 + "="


@pytest.fixture(scope="module")
def server() -> Iterator[ServiceBus]:
    """Yield a look-alike of its own."""
    made = private(ServiceBus)
    yield made
    made.close()


def url_of(server: ServiceBus) -> str:
    return f"servicebus://first@127.0.0.1:{server.port}?emulator=yes&admin_port={server.admin_port}&create=yes"


async def use_replaced_key(server: ServiceBus, *, first: str = "hush0old") -> None:
    """Send before and after a key is replaced that should have lasted for longer, and create a queue."""
    within = stretched(3.0)
    server.control("keys", "first=hush0old")
    keys = ["hush0old"]
    asked: list[str] = []

    def credentials() -> tenure.Credentials:
        asked.append(keys[-1] if asked else first)
        return tenure.Credentials(asked[-1], user="first", lasts=3600)

    async with tenure.connect(url_of(server), credentials=credentials) as backend:
        queue = backend.queue("replaced")
        await queue.send(b"before")
        keys.append("hush1new")
        server.control("keys", "first=hush1new")
        async with asyncio.timeout(within):
            while True:
                with suppress(tenure.Unavailable):
                    await queue.send(b"after")
                    break
                await asyncio.sleep(0)


@pytest.mark.parametrize("first", ["hush0old", "hush9early"], ids=["links", "management"])
async def test_a_replaced_key_is_used_at_once(server: ServiceBus, first: str) -> None:
    await use_replaced_key(server, first=first)


@pytest.mark.parametrize("first", ["hush0old", "hush9early"], ids=["links", "management"])
async def test_a_planted_refusal_that_is_not_heard_is_found(
    server: ServiceBus, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Logins, "refused", lambda *_: None)
    with pytest.raises((ConfigError, tenure.Unavailable, TimeoutError)):
        await use_replaced_key(server, first=first)


def token(password: str, user: str | None = "policy", ends_in: float = 1e9) -> str:
    return signed("sb://x/q", Login(user, Secret(password), ends_at=time.monotonic() + ends_in)).token


@pytest.mark.parametrize(
    ("password", "user", "said"),
    [
        (KEY, None, "without the policy's name"),
        (f"Endpoint=sb://x/;SharedAccessKey={KEY}", None, "not the connection string"),
        ("hush", "policy", "copy the primary or secondary key alone"),
        (f"Endpoint=sb://x/;SharedAccessKey={KEY}", "policy", "not the connection string"),
        ("sr=x&sig=y", None, "copy the whole of it"),
        ("sr=x&sig=y&se=soon&skn=p", None, "no time in seconds"),
        ("sr=x&sig=y&se=1&skn=p", "policy", "leave out the user"),
    ],
)
def test_what_is_no_key_says_what_to_copy(password: str, user: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_login(Login(user, Secret(password)), "credentials=", emulator=False)
    assert password not in str(caught.value)


def test_a_signature_is_passed_on_with_its_first_word() -> None:
    assert token("sr=x&sig=y&se=9999999999&skn=p", None) == "SharedAccessSignature sr=x&sig=y&se=9999999999&skn=p"


def test_what_servers_may_quote_of_a_signature_is_its_value() -> None:
    login = Login(None, Secret("SharedAccessSignature sr=x&sig=y%3D&se=9999999999&skn=p"))
    assert check_login(login, "credentials=", emulator=False) == [Secret("y=")]
    assert check_login(Login("p", Secret(KEY)), "credentials=", emulator=False) == ()


async def test_a_link_signs_with_newer_logins_once_it_is_attached() -> None:
    """Its tasks have the context in which it was attached."""
    newest = ["a"]
    logins = logins_of("servicebus://x", PasswordOptions(), FromList(newest), user="p", password=None)
    signer = Signer(logins)
    may_sign = asyncio.Event()

    async def sign_later() -> str:
        await may_sign.wait()
        return (await signer.get_token("sb://x/q")).token

    with signer.attaching(Login("p", Secret("a"))):
        later = asyncio.create_task(sign_later())
    newest.append("b")
    may_sign.set()
    assert signed_by(await later, "b")


def signed_by(written: str, key: str) -> bool:
    parts = dict(part.split("=", 1) for part in written.removeprefix("SharedAccessSignature ").split("&"))
    made = hmac.new(key.encode(), f"{parts['sr']}\n{parts['se']}".encode(), hashlib.sha256).digest()
    return unquote(parts["sig"]) == base64.b64encode(made).decode()


class FromList:
    """A source that gives the last of a list."""

    keeps = 0.0
    name = "credentials="

    def __init__(self, passwords: list[str]) -> None:
        self._passwords = passwords

    async def ask(self) -> tenure.Credentials:
        return tenure.Credentials(self._passwords[-1])


def test_a_token_ends_with_its_login() -> None:
    ends = int(token(KEY, ends_in=60).partition("&se=")[2].partition("&")[0])
    assert ends <= time.time() + 60


async def test_two_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    with pytest.raises(ConfigError, match="leave out all but one"):
        async with tenure.connect(f"servicebus://example?password_file={tmp_path}/key&connection_string_env=X"):
            pass
