"""One way to read the files for TLS."""

from __future__ import annotations

import os
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tenure._opened import Fact
from tenure._option_files import SIZE_MAX
from tenure._tls_context import ReloadingContext, tls_context
from tenure.errors import ConfigError
from tests.servers import Authority


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_certificate_and_name_are_verified(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue(tmp_path, usage="clientAuth")
    context = tls_context("h:1", ca=str(authority.certificate), cert=str(certificate), key=str(key)).latest()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert len(context.get_ca_certs()) == 1
    context = tls_context("h:1", ca=None, cert=None, key=None, check_hostname=False).latest()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)


def test_files_that_can_not_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    certificate, key = map(str, authority.issue(tmp_path))
    other, nothing = str(authority.certificate), tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    for files in (
        {"ca": str(nothing), "cert": None, "key": None},
        {"ca": None, "cert": str(nothing), "key": None},
        {"ca": None, "cert": certificate, "key": None},
        {"ca": None, "cert": other, "key": key},
    ):
        named = ", ".join(f"{name}={path}" for name, path in files.items() if path)
        with pytest.raises(ConfigError) as raised:
            tls_context("h:1", ca=files["ca"], cert=files["cert"], key=files["key"])
        assert str(raised.value).startswith(f"the files for TLS with h:1 ({named}) can't be used: ")


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue(tmp_path, usage="clientAuth")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:hush", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="the key has a password; remove it with openssl pkey"):
        tls_context("h:1", ca=None, cert=str(certificate), key=str(locked))


# --- files that change ---


class Pair:
    """The files of one side, written anew for each certificate."""

    def __init__(self, folder: Path, usage: str) -> None:
        self._folder = folder
        self._usage = usage
        self.ca, self.cert, self.key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
        folder.mkdir()

    def write(self, authority: Authority, *, host: str = "127.0.0.1", only: str = "") -> None:
        cert, key = authority.issue(self._folder, host, self._usage)
        for name, source in (("ca", authority.certificate), ("cert", cert), ("key", key)):
            if not only or name == only:
                getattr(self, name).write_bytes(source.read_bytes())

    def context(self, purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> ReloadingContext:
        return tls_context("h:1", ca=str(self.ca), cert=str(self.cert), key=str(self.key), purpose=purpose)


@pytest.fixture
def client(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "client", "clientAuth")


@pytest.fixture
def server(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "server", "serverAuth")


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Let both begin a connection, in memory; raises ``ssl.SSLError`` if one doesn't trust the other."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    ready = set[int]()
    while len(ready) < 2:
        for number, side in enumerate((ours, theirs)):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
                ready.add(number)


def test_each_handshake_uses_what_the_files_have_by_then_on_both_sides(client: Pair, server: Pair) -> None:
    first = Authority()
    client.write(first)
    server.write(first)
    asks, answers = client.context(), server.context(ssl.Purpose.CLIENT_AUTH)
    shake_hands(asks, answers)
    used = asks.latest(), answers.latest()
    assert (asks.latest(), answers.latest()) == used
    second = Authority("another authority")
    client.write(second)
    with pytest.raises(ssl.SSLError):
        shake_hands(asks, answers)
    server.write(second)
    shake_hands(asks, answers)
    assert (asks.latest() is used[0], answers.latest() is used[1]) == (False, False)


def test_a_file_that_looks_the_same_is_read_again(client: Pair, authority: Authority) -> None:
    """Its size and its times say nothing: a file system may keep its times for several writes."""
    client.write(authority)
    used, seen = list[ssl.SSLContext](), set[tuple[int, int]]()
    context: ReloadingContext | None = None
    for one in (authority, Authority("another authority")):
        client.ca.write_bytes(one.certificate.read_bytes().ljust(5_000, b"\n"))
        os.utime(client.ca, ns=(0, 0))
        context = context or client.context()
        used.append(context.latest())
        seen.add((client.ca.stat().st_size, client.ca.stat().st_mtime_ns))
    assert used[0] is not used[1]
    assert len(seen) == 1


@pytest.mark.parametrize("trouble", ["missing", "half", "key of another", "a pipe", "too large", "no authority"])
def test_files_that_can_not_be_used_are_reported_once_and_what_was_read_before_is_used(
    client: Pair, authority: Authority, trouble: str
) -> None:
    client.write(authority)
    context, facts = client.context(), list[Fact]()
    context.report_to(facts.append)
    used = context.latest()
    for times in (1, 2):
        match trouble:
            case "missing":
                client.cert.unlink()
            case "half":
                client.cert.write_bytes(client.cert.read_bytes()[:200])
            case "key of another":
                client.write(authority, only="key")
            case "a pipe":
                client.key.unlink()
                os.mkfifo(client.key)
            case "too large":
                client.ca.write_bytes(b" " * (SIZE_MAX + 1))
            case _:
                client.ca.write_text("no authority")
        assert [context.latest() is used for _ in range(3)] == [True] * 3
        assert (len(facts), facts[-1].code) == (times, "certificate-not-renewed")
        assert f"{client.ca}, {client.cert}, {client.key} have now can't be used: " in facts[-1].value
        assert ", until 20" in facts[-1].advice
        assert context.own is not None
        assert context.own.not_renewed
        if trouble == "a pipe":
            client.key.unlink()
        client.write(authority)
        used_before, used = used, context.latest()
        assert used is not used_before
        assert not context.own.not_renewed


def test_the_certificate_that_is_shown_is_known(client: Pair, authority: Authority) -> None:
    client.write(authority)
    own = client.context().own
    assert own is not None
    assert (own.name, own.is_over, own.ends[:2]) == (str(client.cert), False, "20")
    assert str(own) == f"the client's certificate {client.cert}"
    assert tls_context("h:1", ca=str(client.ca), cert=None, key=None).own is None
