"""A key with a password: refused by every store, and nobody is asked for the password on the terminal."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import termios
from base64 import b64encode
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")

from tests.servers import Authority
from tests.servers.tls_listener import Protocol, TlsListener

FILES = "cert={cert}&key={key}&ca={ca}"
KUBECONFIGS = {
    "files.json": {"client-certificate": "{cert}", "client-key": "{key}"},
    "texts.json": {"client-certificate-data": "{cert_text}", "client-key-data": "{key_text}"},
}
"""The user of each kubeconfig: ``kubernetes:`` has no options for a certificate."""
URLS: dict[str, Protocol] = {
    **{f"kubernetes://default?kubeconfig={{folder}}/{name}": "tls" for name in KUBECONFIGS},
    f"etcds://{{at}}/?{FILES}": "tls",
    f"amqps://{{at}}/?{FILES}": "tls",
    f"rediss://{{at}}/?{FILES}": "tls",
    f"rediss://{{at}}/?cluster=yes&{FILES}": "tls",
    f"rediss+sentinel://{{at}}/orders?{FILES}": "tls",
    f"zookeeper://{{at}}/?tls=yes&{FILES}": "tls",
    f"nats://{{at}}/?{FILES}": "nats",
    "postgresql://u@{at}/d?sslcert={cert}&sslkey={key}&sslrootcert={ca}": "postgres",
    "peers://{at},127.0.0.1:9?quorum=majority&tls_ca={ca}&tls_cert={cert}&tls_key={key}&ttl_max=1": "tls",
}

ASKING = """
import asyncio, sys
from tenure._registry import load
from tenure._url import Url
from tenure.errors import TenureError

async def ask(url):
    parsed = Url.parse(url)
    try:
        backend = load(parsed).open(parsed)
    except TenureError as error:
        return error
    try:
        await (getattr(backend, "leases", None) or backend.broker).names()
    except TenureError as error:
        return error
    finally:
        await backend.close()

for url in sys.argv[1:]:
    error = asyncio.run(ask(url))
    print(url.partition(":")[0], type(error).__name__, error, flush=True)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="no terminal of this kind")
def test_nobody_is_asked_for_the_password_of_a_key(tmp_path: Path) -> None:
    authority = Authority()
    (tmp_path / "server").mkdir()
    cert, key = authority.issue(tmp_path, "client", "clientAuth")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:hush", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    locked.chmod(0o600)
    has = authority.issue(tmp_path / "server")
    with ExitStack() as stack:
        ports = {kind: stack.enter_context(TlsListener(kind, has)).port for kind in set(URLS.values())}
        files = {"ca": authority.certificate, "cert": cert, "key": locked, "folder": tmp_path}
        texts = {f"{name}_text": b64encode(files[name].read_bytes()).decode() for name in ("cert", "key")}
        for name, written in KUBECONFIGS.items():
            user = {option: value.format(**files, **texts) for option, value in written.items()}
            (tmp_path / name).write_text(json.dumps(kubeconfig(ports["tls"], authority.certificate, user)))
        urls = [url.format(at=f"127.0.0.1:{ports[kind]}", **files) for url, kind in URLS.items()]
        lines = said_on_a_terminal([sys.executable, "-c", ASKING, *urls]).splitlines()
    assert len(lines) == len(urls), lines
    for line in lines:
        assert " ConfigError " in line
        # The driver of PostgreSQL takes the password from the URL (sslpassword), and tries none without it.
        assert ("has a password that is missing" if line.startswith("postgresql") else "the key has a password") in line


def kubeconfig(port: int, authority: Path, user: dict[str, str]) -> dict[str, Any]:
    """Return a kubeconfig for a server at *port*, in which the *user* has its certificate."""
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(authority)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "now", "context": {"cluster": "here", "user": "me"}}],
        "current-context": "now",
    }


def said_on_a_terminal(command: list[str]) -> str:
    """Return what *command* writes to its terminal: to the end, or up to a question for a password."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # OpenSSL asks on the terminal of the process
    )
    os.close(theirs)
    said = b""
    try:
        with suppress(OSError):  # the end of a terminal
            while b"pass phrase" not in said and (more := os.read(ours, 2**16)):
                said += more
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return said.decode()
