"""How an API server is found and logged in to: in a pod, by a kubeconfig, with tokens, certificates and commands."""

from __future__ import annotations

import asyncio
import base64
import errno
import gc
import json
import os
import ssl
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import tenure
from tenure._backends import kubernetes
from tenure._backends.kubernetes import address, credentials
from tenure._backends.kubernetes.address import Options, address_of
from tenure._lease import Vacant
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tests.explained import facts_by_name
from tests.servers import Authority, Kubernetes, private, shared

Json = dict[str, Any]

pytestmark = [
    pytest.mark.asyncio,
    # A handshake that fails may leave its transport to the garbage collector, deep in asyncio: it is found here.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TOKENS = {"first-token": "ann", "second-token": "ann"}


@pytest.fixture(autouse=True)
def nothing_left_to_collect() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kubernetes]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    server = shared(Kubernetes, tls=True, tokens=TOKENS)
    server.forget()
    yield server
    server.heal()
    server.set(tokens=TOKENS)


def authority(server: Kubernetes) -> Authority:
    assert server.authority is not None
    return server.authority


def config(server: Kubernetes, user: Json | None = None, cluster: Json | None = None) -> Json:
    """Return a kubeconfig with one context; *cluster* replaces the trusted authority, and what it has."""
    if cluster is None:
        cluster = {"certificate-authority": str(authority(server).certificate)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "work",
        "contexts": [{"name": "work", "context": {"cluster": "c", "user": "u", "namespace": "other"}}],
        "clusters": [{"name": "c", "cluster": {"server": server.server, **cluster}}],
        "users": [{"name": "u", "user": user if user is not None else {"token": "first-token"}}],
    }


def written(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


async def ask(url: str = "kubernetes://") -> str:
    """Ask the server that is found; return the namespace that was used."""
    backend = kubernetes.open(Url.parse(url))
    try:
        assert isinstance(await backend.leases.inspect("nothing"), Vacant)
        return backend._client.address.namespace
    finally:
        await backend.close()


# --- where a cluster is found ------------------------------------------------------------------------------------


@pytest.fixture(name="pod")
def _pod(server: Kubernetes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make this process a pod; return the folder of its service account."""
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("first-token\n")
    (account / "ca.crt").write_bytes(authority(server).certificate.read_bytes())
    (account / "namespace").write_text("kube-system")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    found = address_of

    def in_pod(url: Url, options: Options) -> address.Address:
        return found(url, options, account=account)

    monkeypatch.setattr(kubernetes, "address_of", in_pod)
    return account


async def test_in_a_pod_its_service_account_is_used(server: Kubernetes, pod: Path) -> None:
    assert await ask() == "kube-system"
    assert await ask("kubernetes://other") == "other"
    assert [one["user"] for one in server.requests()] == ["ann", "ann"]


async def test_a_kubeconfig_in_the_environment_comes_before_the_service_account(
    server: Kubernetes, pod: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(written(tmp_path / "config", config(server))))
    assert await ask() == "other"


async def test_the_service_account_comes_before_the_kubeconfig_at_home(
    server: Kubernetes, pod: Path, tmp_path: Path
) -> None:
    written(tmp_path / "home" / ".kube" / "config", config(server))
    assert await ask() == "kube-system"
    assert await ask("kubernetes://?context=work") == "other"


@pytest.mark.parametrize("place", ["home", "KUBECONFIG", "both"])
async def test_a_kubeconfig_in_a_folder_that_can_not_be_entered_is_told(
    server: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Root can enter every folder, so the system says for it what it would say for another user."""
    file = tmp_path / "home" / ".kube" / "config"
    written(file, config(server))
    if place != "home":
        monkeypatch.setenv("KUBECONFIG", f"{file}{os.pathsep}/nowhere" if place == "both" else str(file))

    def forbidding(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *more: Any, **named: Any) -> Any:
            if str(path).startswith(str(file.parent)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *more, **named)

        return called

    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, forbidding(getattr(os, name)))
    with pytest.raises(ConfigError, match=f"names {file}, which can't be read: Permission denied"):
        await ask()


async def test_a_token_file_is_an_outage_only_if_it_was_read_before(tmp_path: Path) -> None:
    credential = credentials.TokenFile(tmp_path / "token")
    with pytest.raises(ConfigError, match="token can't be read: No such file"):
        await credential.login(refused=None)
    (tmp_path / "token").write_text("first-token")
    login = await credential.login(refused=None)
    (tmp_path / "token").unlink()
    with pytest.raises(Unavailable, match=r"token can't be read: No such file.*it worked before"):
        await credential.login(refused=login)


async def test_a_kubeconfig_in_the_home_of_nobody_is_told(server: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "~no-such-user/config")
    with pytest.raises(ConfigError, match="names ~no-such-user/config, which can't be read: No such file"):
        await ask()


async def test_the_kubeconfig_at_home_is_found(server: Kubernetes, tmp_path: Path) -> None:
    written(tmp_path / "home" / ".kube" / "config", config(server))
    assert await ask() == "other"
    assert await ask("kubernetes://kube-system") == "kube-system"


async def test_without_a_cluster_the_ways_to_name_one_are_told(server: Kubernetes) -> None:
    with pytest.raises(ConfigError, match=r"no Kubernetes cluster was found: .*KUBECONFIG.*\?server="):
        kubernetes.open(Url.parse("kubernetes://"))


async def test_kubeconfigs_are_merged_as_kubectl_does(
    server: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = config(server)
    first = {"current-context": "", "users": full["users"], "contexts": []}
    second = {**full, "users": [{"name": "u", "user": {"token": "wrong"}}]}
    paths = [tmp_path / "missing", written(tmp_path / "a", first), written(tmp_path / "b", second)]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, paths)))
    assert await ask() == "other"


async def test_a_context_is_chosen(server: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = config(server)
    full["contexts"].append({"name": "second", "context": {"cluster": "c", "user": "u"}})
    path = written(tmp_path / "config", full)
    assert await ask(f"kubernetes://?kubeconfig={path}&context=second") == "default"
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match=r"has no context 'secund'; did you mean 'second'\? \(known: second, work\)"):
        await ask("kubernetes://?context=secund")
    del full["current-context"]
    written(path, full)
    with pytest.raises(ConfigError, match=r"no current context; add \?context=NAME \(known: second, work\)"):
        await ask()


# --- logins ------------------------------------------------------------------------------------------------------


async def test_a_token_of_the_environment_is_used(server: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "second-token")
    assert await ask(f"{server.url}&token_env=MY_TOKEN") == "default"


async def test_a_wrong_token_is_refused(server: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret-wrong")
    with pytest.raises(ConfigError, match=r"refused the login; renew the token or .* from the URL") as raised:
        await ask(f"{server.url}&token_env=MY_TOKEN")
    assert "s3cret" not in str(raised.value)


async def test_a_rotated_token_is_read_at_once_when_the_old_one_is_refused(server: Kubernetes, pod: Path) -> None:
    backend = kubernetes.open(Url.parse("kubernetes://"))
    try:
        await backend.leases.inspect("nothing")
        server.set(tokens={"second-token": "ann"})
        (pod / "token").write_text("second-token")
        server.forget()
        await backend.leases.inspect("nothing")
        assert [one["status"] for one in server.requests()] == [401, 404]
        (pod / "token").write_text("third-token")
        server.set(tokens={"fourth-token": "ann"})
        with pytest.raises(Unavailable, match=r"refused the login; renew .* this pod's service account.*worked before"):
            await backend.leases.inspect("nothing")
    finally:
        await backend.close()


async def test_a_token_file_is_read_again_after_a_minute(
    server: Kubernetes, pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = kubernetes.open(Url.parse("kubernetes://"))
    try:
        await backend.leases.inspect("nothing")
        (pod / "token").write_text("second-token")
        credential = backend._client.address.access.credential
        assert isinstance(credential, credentials.TokenFile)
        now = [time.monotonic()]
        monkeypatch.setattr(credentials, "time", SimpleNamespace(monotonic=lambda: now[0]))
        now[0] = credential._read_at + 59.9
        assert (await credential.login(refused=None)).token == Secret("first-token")
        now[0] += 0.1
        assert (await credential.login(refused=None)).token == Secret("second-token")
        (pod / "token").unlink()
        now[0] += 60.0
        assert (await credential.login(refused=None)).token == Secret("second-token")  # it is being replaced
        await backend.leases.inspect("nothing")
    finally:
        await backend.close()


async def test_a_token_file_of_a_kubeconfig_is_relative_to_it(server: Kubernetes, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first-token")
    path = written(tmp_path / "config", config(server, {"tokenFile": "token"}))
    assert await ask(f"kubernetes://?kubeconfig={path}") == "other"


def client_certificate(server: Kubernetes, folder: Path) -> tuple[Path, Path]:
    """Issue a certificate for the user ann, as kubeadm does for administrators."""
    issuer = authority(server)
    key, request, certificate = folder / "ann.key", folder / "ann.csr", folder / "ann.pem"
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/O=staff/CN=ann"]
    by = ["-CA", str(issuer.certificate), "-CAkey", str(issuer._key), "-CAcreateserial", "-days", "2"]
    for command in (
        ["req", *new, "-keyout", str(key), "-out", str(request)],
        ["x509", "-req", "-in", str(request), *by, "-out", str(certificate)],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("as_data", [True, False])
async def test_a_client_certificate_is_used(server: Kubernetes, tmp_path: Path, *, as_data: bool) -> None:
    certificate, key = client_certificate(server, tmp_path)
    user: Json = {"client-certificate": "ann.pem", "client-key": "ann.key"}
    if as_data:
        user = {
            "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
            "client-key-data": base64.b64encode(key.read_bytes()).decode(),
        }
    path = written(tmp_path / "config", config(server, user))
    assert await ask(f"kubernetes://?kubeconfig={path}") == "other"
    assert [one["user"] for one in server.requests()] == ["ann"]


async def test_an_untrusted_server_is_refused(server: Kubernetes, tmp_path: Path) -> None:
    other = Authority("another authority")
    path = written(tmp_path / "config", config(server, cluster={"certificate-authority": str(other.certificate)}))
    with pytest.raises(ConfigError, match=r"certificate is not trusted .*name its authority"):
        await ask(f"kubernetes://?kubeconfig={path}")


async def test_a_rotated_authority_is_read_when_a_server_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server is restarted with a certificate of another authority, and the file has that one a little later."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "ca.crt"
    with private(Kubernetes, tls=True) as server:
        file.write_bytes(authority(server).certificate.read_bytes())
        cluster = {"certificate-authority": "ca.crt"}
        by_config = f"kubernetes://?kubeconfig={written(tmp_path / 'config', config(server, cluster=cluster))}"
        by_option = f"kubernetes://other?server={server.server}&ca={file}"
        backends = [kubernetes.open(Url.parse(url)) for url in (by_config, by_option)]
        watches = [backend.leases.hints("nothing") for backend in backends]
        try:
            for backend in backends:
                await backend.leases.inspect("nothing")
            server.stop()
            server.authority = Authority("the next authority")
            server.authority.issue(server.folder)
            server.start()
            for written_now in (file.read_text(), "half of a cert", None):
                if written_now is None:
                    file.unlink()
                else:
                    file.write_text(written_now)
                for backend in backends:
                    with pytest.raises(Unavailable, match=r"is not trusted.*it worked before"):
                        await backend.leases.inspect("nothing")
            file.write_bytes(server.authority.certificate.read_bytes())
            for backend, hints in zip(backends, watches, strict=True):
                await asyncio.wait_for(anext(hints), 10.0)
                answers = await asyncio.gather(*(backend.leases.inspect(f"nothing-{number}") for number in range(5)))
                assert answers == [Vacant(f"nothing-{number}") for number in range(5)]
        finally:
            for backend in backends:
                await backend.close()


async def test_another_current_context_does_not_mix_two_clusters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``kubectl config use-context`` while a program runs: the server of the one isn't judged by the other's files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with private(Kubernetes, tls=True) as server:
        content = config(server)
        other = Authority("of another cluster").certificate
        content["clusters"].append(
            {"name": "d", "cluster": {"server": "https://127.0.0.1:1", "certificate-authority": str(other)}}
        )
        content["contexts"].append({"name": "play", "context": {"cluster": "d", "user": "u"}})
        path = written(tmp_path / "config", content)
        backend = kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}"))
        try:
            await backend.leases.inspect("nothing")
            written(path, {**content, "current-context": "play"})
            server.stop()
            server.start()
            assert await backend.leases.inspect("nothing") == Vacant("nothing")
        finally:
            await backend.close()


async def test_the_certificate_of_a_server_need_not_be_checked(server: Kubernetes, tmp_path: Path) -> None:
    path = written(tmp_path / "config", config(server, cluster={"insecure-skip-tls-verify": True}))
    backend = kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}"))
    try:
        facts = facts_by_name(await backend.describe())
    finally:
        await backend.close()
    assert "insecure-skip-tls-verify" in facts["server"].advice
    assert facts["server"].code == "kubernetes-tls"
    assert facts["TLS"].value == "TLS; nothing is verified (insecure-skip-tls-verify)"


@pytest.mark.parametrize("token", [True, False])
async def test_a_token_that_is_sent_without_tls_has_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, token: bool
) -> None:
    monkeypatch.setenv("TOKEN_HERE", "first-token")
    with private(Kubernetes, tokens=TOKENS if token else None) as plain:
        url = f"kubernetes://other?server={plain.server}{'&token_env=TOKEN_HERE' if token else ''}"
        async with tenure.connect(url) as backend:
            told = (await backend.diagnose(write=False)).facts
            assert await backend.leaders() == {}
    assert plain.server.startswith("http:")
    warned = [(fact.name, fact.advice) for fact in told if fact.code == "kubernetes-tls" and fact.advice]
    assert warned == ([("server", "the token is sent without TLS")] if token else [])
    assert "first-token" not in f"{told} {caplog.text}"


async def test_a_server_may_have_a_certificate_for_another_name(server: Kubernetes, tmp_path: Path) -> None:
    through = server.server.replace("127.0.0.1", "localhost")
    cluster = {"certificate-authority": str(authority(server).certificate), "server": through}
    path = written(tmp_path / "config", config(server, cluster=cluster))
    with pytest.raises(ConfigError, match="certificate is for another host"):
        await ask(f"kubernetes://?kubeconfig={path}")
    path = written(tmp_path / "config", config(server, cluster=cluster | {"tls-server-name": "127.0.0.1"}))
    assert await ask(f"kubernetes://?kubeconfig={path}") == "other"


# --- credential commands -----------------------------------------------------------------------------------------

PLUGIN = """#!{python}
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
calls = folder / "calls"
with calls.open("a") as log:
    log.write(os.environ["KUBERNETES_EXEC_INFO"] + "\\n")
print((folder / "answer").read_text())
sys.stderr.write("please log in\\n")
sys.exit(int(os.environ.get("STATUS", "0")))
"""


class Plugin:
    """A credential command, with the answer that it gives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "get-token"
        program.write_text(PLUGIN.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def answers(self, version: str = "v1", **status: Any) -> None:
        (self.folder / "answer").write_text(
            json.dumps({"apiVersion": f"client.authentication.k8s.io/{version}", "status": status})
        )

    @property
    def calls(self) -> list[Json]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def user(self, **fields: Any) -> Json:
        command = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./get-token"}
        return {"exec": {**command, "args": [str(self.folder)], "interactiveMode": "Never", **fields}}


@pytest.fixture(name="plugin")
def _plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


async def test_a_credential_command_is_run_once(server: Kubernetes, tmp_path: Path, plugin: Plugin) -> None:
    path = written(tmp_path / "config", config(server, plugin.user(provideClusterInfo=True)))
    plugin.answers(token="first-token", expirationTimestamp=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    backend = kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}"))
    try:
        await asyncio.gather(*(backend.leases.inspect(f"nothing-{number}") for number in range(5)))
        assert len(plugin.calls) == 1
        assert plugin.calls[0]["spec"] == {"interactive": False, "cluster": {"server": server.server}}
        plugin.answers(token="second-token")
        server.set(tokens={"second-token": "ann"})
        await backend.leases.inspect("nothing")
        assert len(plugin.calls) == 2
    finally:
        await backend.close()


async def test_a_credential_that_has_expired_is_replaced(server: Kubernetes, tmp_path: Path, plugin: Plugin) -> None:
    path = written(tmp_path / "config", config(server, plugin.user()))
    plugin.answers(token="first-token", expirationTimestamp=(datetime.now(UTC) + timedelta(seconds=5)).isoformat())
    backend = kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}"))
    try:
        for number in (1, 2):
            await backend.leases.inspect("nothing")
            assert len(plugin.calls) == number
    finally:
        await backend.close()


async def test_a_command_may_give_a_certificate(server: Kubernetes, tmp_path: Path, plugin: Plugin) -> None:
    certificate, key = client_certificate(server, tmp_path)
    plugin.answers("v1beta1", clientCertificateData=certificate.read_text(), clientKeyData=key.read_text())
    user = plugin.user(apiVersion="client.authentication.k8s.io/v1beta1")
    path = written(tmp_path / "config", config(server, user))
    assert await ask(f"kubernetes://?kubeconfig={path}") == "other"
    assert [one["user"] for one in server.requests()] == ["ann"]


async def test_a_command_that_fails_is_no_answer(server: Kubernetes, tmp_path: Path, plugin: Plugin) -> None:
    plugin.answers(token="first-token")
    user = plugin.user(env=[{"name": "STATUS", "value": "3"}])
    path = written(tmp_path / "config", config(server, user))
    with pytest.raises(Unavailable, match=r"get-token' ended with status 3: please log in; log in with it"):
        await ask(f"kubernetes://?kubeconfig={path}")


async def test_a_command_that_hangs_is_named_and_awaited(server: Kubernetes, tmp_path: Path, plugin: Plugin) -> None:
    os.mkfifo(plugin.folder / "answer")
    path = written(tmp_path / "config", config(server, plugin.user()))
    backend = kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}&timeout=0.3"))
    try:
        with pytest.raises(
            Unavailable, match=r"credential command '.*get-token' gave no answer within 0.3 s, so nothing"
        ):
            await backend.leases.inspect("nothing")
        await asyncio.to_thread(plugin.answers, token="first-token")  # returns when the command reads it
        backend._client.options = replace(backend._client.options, timeout=10.0)
        assert await backend.leases.inspect("nothing") == Vacant("nothing")
        assert len(plugin.calls) == 1
    finally:
        await backend.close()


HOLDS_OUTPUT = """#!/bin/sh
exec 3> alive
sleep 60 &
[ "$1" = waits ] && wait
exit 0
"""


@pytest.mark.parametrize("command", ["waits", "ends"])
async def test_all_that_a_command_has_started_is_killed_with_it(
    server: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A process of the command keeps its output open, also after the command's own end."""
    monkeypatch.setattr(credentials, "COMMAND_MAX", 1.0)
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "holds-output"
    program.write_text(HOLDS_OUTPUT)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program), "args": [command]}}
        path = written(tmp_path / "config", config(server, user))
        with pytest.raises(Unavailable, match=r"credential command '.*holds-output' took over 1 s"):
            await ask(f"kubernetes://?kubeconfig={path}")
        await until(lambda: is_at_end(alive))
    finally:
        os.close(alive)


def is_at_end(pipe: int) -> bool:
    """Return whether no process has the other end of *pipe* open any more."""
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [("0", ConfigError, "wrote no ExecCredential"), ("3", Unavailable, "ended with status 3: please log in")],
)
async def test_the_output_of_a_command_is_not_shown(
    server: Kubernetes, tmp_path: Path, plugin: Plugin, status: str, error: type[Exception], told: str
) -> None:
    (plugin.folder / "answer").write_text("s3cret")
    path = written(tmp_path / "config", config(server, plugin.user(env=[{"name": "STATUS", "value": status}])))
    with pytest.raises(error, match=told) as raised:
        await ask(f"kubernetes://?kubeconfig={path}")
    assert "s3cret" not in "".join(traceback.format_exception(raised.value))


async def test_a_missing_command_is_named_with_its_hint(server: Kubernetes, tmp_path: Path, plugin: Plugin) -> None:
    user = plugin.user(command="tenure-no-such-command", installHint="install it from example.com")
    path = written(tmp_path / "config", config(server, user))
    with pytest.raises(ConfigError, match=r"'tenure-no-such-command' can't be run: .*; install it from example\.com"):
        await ask(f"kubernetes://?kubeconfig={path}")


@pytest.mark.parametrize("fields", [{"args": ["a\0b"]}, {"env": [{"name": "A=", "value": "b"}]}], ids=repr)
async def test_a_command_that_no_system_can_run_is_named(
    server: Kubernetes, tmp_path: Path, plugin: Plugin, fields: Json
) -> None:
    path = written(tmp_path / "config", config(server, plugin.user(**fields)))
    with pytest.raises(ConfigError, match=r"get-token' can't be run: "):
        await ask(f"kubernetes://?kubeconfig={path}")


async def test_a_command_is_told_of_a_cluster_with_odd_values(
    server: Kubernetes, tmp_path: Path, plugin: Plugin
) -> None:
    plugin.answers(token="first-token")
    found = config(server, plugin.user(provideClusterInfo=True))
    found["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = date(2026, 11, 23)
    await ask(f"kubernetes://?kubeconfig={written(tmp_path / 'config', found)}")
    assert plugin.calls[0]["spec"]["cluster"]["insecure-skip-tls-verify"] == "2026-11-23"


async def test_a_command_line_leads_with_a_credential_command(
    server: Kubernetes, tmp_path: Path, plugin: Plugin
) -> None:
    plugin.answers(token="first-token")
    path = written(tmp_path / "config", config(server, plugin.user()))
    command = [sys.executable, "-m", "tenure", "lead", "by-command", "--on", f"kubernetes://?kubeconfig={path}"]
    process = await asyncio.create_subprocess_exec(*command, "--", "true")
    assert await process.wait() == 0
    assert len(plugin.calls) == 1
    assert server.lease("by-command", "other")["spec"]["holderIdentity"] == ""


# --- what can't be used ------------------------------------------------------------------------------------------


EXEC = {"command": "x", "apiVersion": "client.authentication.k8s.io/v1"}


@pytest.mark.parametrize(
    ("user", "cluster", "why"),
    [
        ({"auth-provider": {"name": "gcp"}}, {}, "has auth-provider, which can't be used: .*use exec"),
        ({"username": "ann", "password": "s3cret"}, {}, "has username, which can't be used: .*use a token"),
        ({"token": "s3cret", "as": "bob"}, {}, "has as, which can't be used"),
        ({"exec": {"command": "x", "apiVersion": "v7"}}, {}, "apiVersion 'v7'; tenure knows client.authentication"),
        ({"exec": {}, "token": ""}, {}, None),
        ({"exec": {"apiVersion": "x"}}, {}, "names no command"),
        ({"exec": {"command": "x", "interactiveMode": "Always"}}, {}, "must be run at a terminal"),
        ({"exec": "gke-gcloud-auth-plugin"}, {}, "names no command"),
        ({"exec": {**EXEC, "args": "--token"}}, {}, "exec of user 'u' has args that are no list"),
        ({"exec": {**EXEC, "env": ["A=b"]}}, {}, "has env that are no list of entries"),
        ({"client-certificate": "/nowhere/ann.pem"}, {}, "names /nowhere/ann.pem, which can't be read: No such file"),
        ({"client-certificate-data": "%"}, {}, "client-certificate-data of 'u' is no base64"),
        ({"client-certificate-data": "é"}, {}, "client-certificate-data of 'u' is no base64"),
        ({"client-certificate": "a\0b"}, {}, "which can't be read: no file can have this path"),
        ({}, {"proxy-url": "http://proxy:3128"}, "has proxy-url, which tenure doesn't support"),
        ({}, {"server": "10.0.0.1:6443"}, "must be an address such as https://10.0.0.1:6443, .*, not '10.0.0.1:6443'"),
        ({}, {"server": "https://h:0"}, "must be an address such as"),
        ({}, {"server": "https://ann:s3cret@h"}, "must be an address such as"),
        ({}, {"certificate-authority": "/nowhere/ca"}, "names /nowhere/ca, which can't be read"),
        (
            {},
            {"certificate-authority-data": "QQ==", "server": "http://h"},
            "h, which is asked without TLS; write https",
        ),
        (
            {},
            {"certificate-authority-data": "QQ==", "insecure-skip-tls-verify": True},
            "which trusts anybody; leave out",
        ),
    ],
)
async def test_what_a_kubeconfig_may_not_have(
    server: Kubernetes, tmp_path: Path, user: Json, cluster: Json, why: str | None
) -> None:
    path = written(tmp_path / "config", config(server, user, cluster))
    if why is None:
        kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}"))
        return
    with pytest.raises(ConfigError, match=why) as raised:
        kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}"))
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [("a: [", "is no YAML in line 1"), ("- a", "is no kubeconfig"), ("", "is no kubeconfig"), ("\0", "is no YAML")]
    + [(content, "is no YAML") for content in ("a: 2026-13-45", "a: " + "9" * 5_000, "[" * 5_000)],
    ids=lambda text: str(text)[:20],
)
async def test_a_file_that_is_no_kubeconfig_is_named(
    server: Kubernetes, tmp_path: Path, content: str, why: str
) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(ConfigError, match=why):
        kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}"))


@pytest.mark.parametrize(
    "found", [5, "work", {"work": 1}, [None], [{"name": "work", "context": "c"}], [{"context": {}}]]
)
@pytest.mark.parametrize("kind", ["contexts", "clusters", "users"])
async def test_a_kubeconfig_of_another_shape_is_named(
    server: Kubernetes, tmp_path: Path, kind: str, found: Any
) -> None:
    path = written(tmp_path / "config", config(server) | {kind: found})
    with pytest.raises(ConfigError, match=r"kubeconfig .*/config has "):
        kubernetes.open(Url.parse(f"kubernetes://?kubeconfig={path}"))


async def test_an_empty_file_among_kubeconfigs_is_skipped(
    server: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    path = written(tmp_path / "config", config(server))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'empty'}:{path}")
    assert await ask() == "other"


async def test_a_kubeconfig_of_the_url_may_be_in_the_home(server: Kubernetes, tmp_path: Path) -> None:
    written(tmp_path / "home" / "work.yaml", config(server))
    assert await ask("kubernetes://?kubeconfig=~/work.yaml") == "other"


async def test_a_check_that_is_switched_off_by_a_text_is_on(server: Kubernetes, tmp_path: Path) -> None:
    cluster = {"insecure-skip-tls-verify": "false"}
    path = written(tmp_path / "config", config(server, cluster=cluster))
    with pytest.raises(ConfigError, match="is not trusted"):
        await ask(f"kubernetes://?kubeconfig={path}")


async def test_the_scheme_of_a_server_may_be_written_in_capitals(server: Kubernetes, tmp_path: Path) -> None:
    cluster = {"certificate-authority": str(authority(server).certificate), "server": server.server.upper()}
    path = written(tmp_path / "config", config(server, cluster=cluster))
    assert await ask(f"kubernetes://?kubeconfig={path}") == "other"


@pytest.mark.parametrize("token", ["s3cret\nsecond line", "s3cret-ü", "s3cret\0"], ids=["lines", "accent", "nul"])
async def test_a_token_that_is_none_is_not_shown(server: Kubernetes, tmp_path: Path, token: str) -> None:
    path = written(tmp_path / "config", config(server, user={"token": token}))
    with pytest.raises((ConfigError, Unavailable)) as raised:
        await ask(f"kubernetes://?kubeconfig={path}")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("text", ["no certificate", "", "\n"], ids=["text", "empty", "blank"])
async def test_a_certificate_that_is_none_is_named(server: Kubernetes, tmp_path: Path, text: str) -> None:
    """An empty file doesn't mean that the authorities of this machine are trusted."""
    (tmp_path / "ca").write_text(text)
    path = written(tmp_path / "config", config(server, cluster={"certificate-authority": "ca"}))
    with pytest.raises(ConfigError, match=r"the certificate authority of the context 'work' .* is no PEM certificate"):
        await ask(f"kubernetes://?kubeconfig={path}")


async def test_strict_checks_of_newer_pythons_are_off() -> None:
    """Certificates of many clusters lack what they require."""
    access = credentials.Access("here", "https://127.0.0.1:1")
    tls = credentials.tls_of(access, credentials.Login())
    assert tls is not None
    context = tls.latest()
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.check_hostname


async def test_no_secret_is_shown() -> None:
    shown = repr(
        credentials.Access(
            "here",
            "https://h",
            credential=credentials.TokenText(Secret("s3cret")),
            certificate=credentials.Login(Secret("t"), "c", Secret("s3cret")),
        )
    )
    assert "s3cret" not in shown
