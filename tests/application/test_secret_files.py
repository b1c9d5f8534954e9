"""A file with a secret that every user can read: refused or told, by every store whose URL names one."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

import tenure
import tenure.sync
from tenure._registry import BACKENDS, load
from tenure._url import Url
from tests.absent import skip_or_fail
from tests.servers.certificates import Authority
from tests.servers.process import free_port, release

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows: its modes say nothing of other users")

KUBECONFIG = """
current-context: here
contexts: [{name: here, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {%s}}]
"""


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a certificate, its key, both in one file, and a login, all for every user to read."""
    folder = tmp_path_factory.mktemp("client")
    try:
        certificate, key = Authority().issue(folder, "client", "clientAuth")
    except FileNotFoundError:
        skip_or_fail("openssl is not installed")
    (folder / "both.pem").write_bytes(certificate.read_bytes() + key.read_bytes())
    (folder / "login").write_text("a seed")
    for each in folder.iterdir():
        each.chmod(0o644)
    return folder


STORES = {
    "etcds://127.0.0.1:1/?cert={0}/server.pem&key={0}/server.key": ["key"],
    "rediss://127.0.0.1:1/?cert={0}/server.pem&key={0}/server.key": ["key"],
    "rediss+sentinel://127.0.0.1:1/name?cert={0}/server.pem&key={0}/server.key": ["key"],
    "amqps://127.0.0.1:1/?cert={0}/server.pem&key={0}/server.key": ["key"],
    "amqps://127.0.0.1:1/?cert={0}/both.pem": ["cert"],
    "zookeeper://127.0.0.1:1/?tls=true&cert={0}/server.pem&key={0}/server.key": ["key"],
    "postgresql://127.0.0.1:1/db?sslcert={0}/server.pem&sslkey={0}/server.key": ["sslkey"],
    "nats://127.0.0.1:1/?cert={0}/server.pem&key={0}/server.key": ["key"],
    "postgresql://ann@127.0.0.1:1/db?password_file={0}/login": ["password_file"],
    "azure://account?password_file={0}/login": ["password_file"],
    "servicebus://policy@namespace?password_file={0}/login": ["password_file"],
    "etcd://ann@127.0.0.1:1/?password_file={0}/login": ["password_file"],
    "zookeeper://ann@127.0.0.1:1/?password_file={0}/login": ["password_file"],
    "nats://127.0.0.1:1/?creds={0}/login": ["creds"],
    "nats://127.0.0.1:1/?nkey={0}/login": ["nkey"],
    "peers://127.0.0.1:1?quorum=none&tls_cert={0}/server.pem&tls_key={0}/server.key&tls_ca={0}/server.pem": ["tls_key"],
}


@pytest.mark.parametrize("url", STORES, ids=lambda url: url.partition("?")[0])
async def test_each_store_tells_of_its_files(certified: Path, url: str) -> None:
    opened = load(Url.parse(url.format(certified))).open(Url.parse(url.format(certified)))
    try:
        warnings = [fact for fact in opened.warnings if fact.name != "key" or fact.value != "none"]
        assert [fact.name for fact in warnings] == STORES[url]
        assert {fact.code for fact in warnings} == {"secret-file-mode"}
    finally:
        await opened.close()


@pytest.mark.parametrize(
    ("user", "told"),
    [
        ("token: abc", ["kubeconfig"]),
        ("client-certificate-data: YQ==, client-key-data: YQ==", ["kubeconfig"]),
        ("client-certificate: {0}/server.pem, client-key: {0}/server.key", ["client-key"]),
        ("tokenFile: {0}/login", []),  # tokens are mounted for all users of a pod
        ("exec: {{command: login, apiVersion: client.authentication.k8s.io/v1}}", []),
    ],
)
async def test_a_kubeconfig_is_told_if_a_secret_of_its_user_is_in_it(
    certified: Path, tmp_path: Path, user: str, told: list[str]
) -> None:
    config = tmp_path / "config"
    config.write_text(KUBECONFIG % user.format(certified))
    config.chmod(0o644)
    url = Url.parse(f"kubernetes://default?kubeconfig={config}")
    opened = load(url).open(url)
    assert [fact.name for fact in opened.warnings] == told
    await opened.close()


@pytest.mark.parametrize("place", ["variable", "service file"])
async def test_a_key_is_told_that_a_variable_or_a_service_file_names(
    certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    names = {"sslcert": f"{certified}/server.pem", "sslkey": f"{certified}/server.key"}
    text = "postgresql://127.0.0.1:1/db"
    if place == "variable":
        for name, path in names.items():
            monkeypatch.setenv(f"PG{name.upper()}", path)
    else:
        file = tmp_path / "services"
        file.write_text("[orders]\n" + "".join(f"{name}={path}\n" for name, path in names.items()))
        monkeypatch.setenv("PGSERVICEFILE", str(file))
        text += "?service=orders"
    url = Url.parse(text)
    opened = load(url).open(url)
    assert [fact.name for fact in opened.warnings] == ["sslkey"]
    await opened.close()


@pytest.mark.parametrize(
    ("password", "told"), [("password=abc", ["service"]), ("sslpassword=abc", ["service"]), ("user=ann", [])]
)
async def test_a_service_file_is_told_if_a_password_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str, told: list[str]
) -> None:
    file = tmp_path / "services"
    file.write_text(f"[orders]\nhost=127.0.0.1\nport=1\n{password}\n")
    file.chmod(0o644)
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    url = Url.parse("postgresql:///db?service=orders")
    opened = load(url).open(url)
    assert [fact.name for fact in opened.warnings] == told
    await opened.close()


async def test_a_warning_is_logged_and_shown_by_the_diagnosis(
    certified: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = f"tls_cert={certified}/server.pem&tls_key={certified}/server.key&tls_ca={certified}/server.pem"
    port = free_port()
    try:
        async with tenure.connect(f"peers://127.0.0.1:{port}?me={port}&quorum=none&{files}") as backend:
            facts = {fact.name: fact for fact in (await backend.diagnose()).facts}
    finally:
        release(port)
    assert facts["tls_key"].code == "secret-file-mode"
    [logged] = [record.getMessage() for record in caplog.records if "tls_key:" in record.getMessage()]
    assert f"tls_key: {certified}/server.key, mode 0644; every user of this machine can read this secret" in logged


async def test_a_shared_key_that_every_user_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "peers.key"
    key.write_text("k" * 32)
    key.chmod(0o644)
    backend = tenure.connect(f"peers://a:7000,b:7000,c:7000?key_file={key}")
    with pytest.raises(tenure.ConfigError, match=f"; run: chmod 600 {key}$") as refused:
        await backend.open()
    assert "kkk" not in str(refused.value)
    key.chmod(0o600)
    await backend.open()
    await backend.aclose()


@pytest.mark.parametrize("content", ["", "\n \n", "short"])
async def test_a_shared_key_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    key = tmp_path / "peers.key"
    key.write_text(content)
    key.chmod(0o600)
    said = rf"must hold at least 16 bytes, not \d; make one with: \(umask 077; openssl rand -hex 32 > {key}\)"
    with pytest.raises(tenure.ConfigError, match=said):
        await tenure.connect(f"peers://a:7000,b:7000,c:7000?key_file={key}").open()


FILES = [
    *STORES,
    "peers://a:7000,b:7000,c:7000?key_file={0}/login",
    "postgresql://127.0.0.1:1/db?sslrootcert={0}/server.pem",
    "postgresql://127.0.0.1:1/db?sslmode=require&sslcrl={0}/server.pem",
    "postgresql://127.0.0.1:1/db?passfile={0}/login",
    "postgresql://127.0.0.1:1/db?service=orders",
    "etcds://127.0.0.1:1/?ca={0}/server.pem",
    "rediss://127.0.0.1:1/?ca={0}/server.pem",
    "amqps://127.0.0.1:1/?ca={0}/server.pem",
    "nats://127.0.0.1:1/?ca={0}/server.pem",
    "zookeeper://127.0.0.1:1/?tls=true&ca={0}/server.pem",
    "kubernetes://default?kubeconfig={0}/login",
    "kubernetes://default?server=https://127.0.0.1:1&ca={0}/server.pem",
]
"""URLs that name files, one for each option that does."""
NAMES = ("server.pem", "server.key", "both.pem", "login")


@pytest.mark.parametrize("url", FILES)
def test_a_file_that_can_not_be_read_is_told_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Root can read every file, so the system says for it what it would say for another user."""
    for name in NAMES:
        (tmp_path / name).write_text("a secret")
    monkeypatch.setenv("PGSERVICEFILE", f"{tmp_path}/login")
    opened = os.open

    def forbidden(path: Any, *more: Any, **named: Any) -> int:
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, *more, **named)

    monkeypatch.setattr(os, "open", forbidden)
    refused = pytest.raises(tenure.ConfigError, match="can't be read: Permission denied")
    with refused, tenure.sync.connect(url.format(tmp_path)) as backend:
        backend.leaders()


def test_every_option_that_names_a_file_is_tried() -> None:
    found = set()
    for module in {module for module, _ in BACKENDS.values()}:
        options = importlib.import_module(f"{module}.address").Options
        fields = {field.name for field in dataclasses.fields(options)}
        found |= {
            name
            for name in fields
            if re.search(r"(^|_)(ca|cert|key|file|creds|nkey|kubeconfig|service)$|^ssl.*(cert|key|crl)$|passfile", name)
        }
    assert [name for name in found if not any(re.search(rf"[?&]{name}=", url) for url in FILES)] == []


@pytest.mark.parametrize("url", FILES)
def test_a_file_that_is_a_pipe_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Whether it is read at once, or by the first request."""
    for name in NAMES:
        os.mkfifo(tmp_path / name)
    monkeypatch.setenv("PGSERVICEFILE", f"{tmp_path}/login")
    refused = pytest.raises(tenure.ConfigError, match="it is a pipe or a device, and must be a regular file")
    with refused, tenure.sync.connect(url.format(tmp_path)) as backend:
        backend.leaders()
