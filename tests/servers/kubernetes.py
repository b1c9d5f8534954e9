"""A Kubernetes API server for tests: a double of its Lease API, or a real ``kube-apiserver`` with its etcd.

The real one is used where ``TENURE_TEST_KUBE_APISERVER`` names the program.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from tests.servers.certificates import Authority
from tests.servers.process import Server, free_port, release

PROGRAM = "TENURE_TEST_KUBE_APISERVER"
"""The environment variable with the path of a kube-apiserver."""

Json = dict[str, Any]


class Kubernetes(Server):
    """The double. Its leases survive a restart; faults and counts don't.

    Args:
        tls: Whether it serves https, with a certificate of ``authority``; clients may have certificates of it, too.
        tokens: The bearer tokens, each with its user; without, everyone is let in.
    """

    install = "nothing: Python is enough"
    scheme = "kubernetes"

    def __init__(self, *, tls: bool = False, tokens: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.authority: Authority | None = Authority() if tls else None
        self._tokens = dict(tokens) if tokens is not None else None

    @classmethod
    def missing(cls) -> str:
        return ""

    def prepare(self) -> None:
        if self.authority is not None:
            self.authority.issue(self.folder)
            shutil.copy(self.authority.certificate, self.folder / "clients.pem")
        self.write("settings.json", json.dumps({"tokens": self._tokens} if self._tokens is not None else {}))

    def argv(self) -> Sequence[str]:
        program = Path(__file__).with_name("kubernetes_api.py")
        return [sys.executable, "-I", "-S", str(program), str(self.port), str(self.folder)]

    @property
    def server(self) -> str:
        """Its address, as a kubeconfig has it."""
        return f"{'https' if self.authority else 'http'}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        trust = f"&ca={self.authority.certificate}" if self.authority else ""
        return f"kubernetes://default?server={self.server}{trust}"

    # --- requests ---

    def ask(
        self, method: str, path: str, body: object = None, *, token: str | None = None, lines: bool = False
    ) -> tuple[int, Any]:
        """Send a request as another client; return the status and the body, as text if it is *lines*."""
        return _answer_of(self.port, self.authority, method, path, body, token=token, lines=lines)

    def lease(self, name: str, namespace: str = "default") -> Json:
        """Return a Lease as it is stored."""
        status, found = self.ask("GET", lease_path(name, namespace), token=self.any_token)
        assert status == 200, found
        assert isinstance(found, dict)
        return found

    def put(self, lease: Json) -> Json:
        """Write a Lease as another client does: it is created, or replaced if it has a ``resourceVersion``."""
        metadata = lease["metadata"]
        namespace = metadata.get("namespace", "default")
        if metadata.get("resourceVersion"):
            method, path = "PUT", lease_path(metadata["name"], namespace)
        else:
            method, path = "POST", lease_path("", namespace)
        status, found = self.ask(method, path, lease, token=self.any_token)
        assert status in (200, 201), found
        assert isinstance(found, dict)
        return found

    def delete(self, name: str, namespace: str = "default") -> None:
        """Delete a Lease."""
        status, found = self.ask("DELETE", lease_path(name, namespace), token=self.any_token)
        assert status == 200, found

    @property
    def any_token(self) -> str | None:
        """A token that it knows, if it requires one."""
        return next(iter(self._tokens), None) if self._tokens else None

    # --- faults; see kubernetes_api.Api.control ---

    def control(self, order: str, **details: Any) -> Any:
        """Give the double an order."""
        status, answer = self.ask("POST", "/control", {"do": order, **details})
        assert status == 200, answer
        return answer

    def set(self, **settings: Any) -> None:
        """Change settings: ``tokens``, ``roles``, ``fields``, ``bookmark_every``."""
        if "tokens" in settings:
            self._tokens = settings["tokens"]
        self.control("set", **settings)

    def fail(self, **fault: Any) -> None:
        """Let requests fail, until ``heal``."""
        self.control("fail", **fault)

    def heal(self) -> None:
        """End all faults."""
        self.control("heal")

    def requests(self) -> list[Json]:
        """Return all requests since ``forget``, with verb, name, user, query and time."""
        found: list[Json] = self.control("requests")
        return found

    def forget(self) -> None:
        """Count requests from now on."""
        self.control("forget")


def apis() -> list[type[Kubernetes] | type[KubeApiserver]]:
    """Return the double, and the real one where its program is named."""
    return [Kubernetes, KubeApiserver] if os.environ.get(PROGRAM) else [Kubernetes]


def lease_path(name: str, namespace: str = "default") -> str:
    """Return the path of a Lease; without a *name*, of all in the namespace."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases{'/' * bool(name)}{name}"


def _answer_of(
    port: int,
    authority: Authority | None,
    method: str,
    path: str,
    body: object,
    *,
    token: str | None,
    lines: bool,
) -> tuple[int, Any]:
    if authority is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    else:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
    headers = {"Content-Type": "application/json", "User-Agent": "other/1.0", **_bearer(token)}
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(text) if text[:1] in (b"{", b"[", b"n") and not lines else text.decode()


def _bearer(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


class _Store(Server):
    """The etcd of a kube-apiserver."""

    install = "etcd (apt-get install etcd-server)"
    scheme = "etcd-of-kubernetes"

    def argv(self) -> Sequence[str]:
        client, peer = self.url, f"http://127.0.0.1:{self._peer_port}"
        return [
            *["etcd", "--data-dir", str(self.folder / "data"), "--listen-client-urls", client],
            *["--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer],
            *["--initial-cluster", f"default={peer}", "--log-level", "error", "--logger", "zap"],
        ]

    def prepare(self) -> None:
        self._peer_port = free_port()

    def ready(self) -> bool:
        answer = self.answers(b"GET /health HTTP/1.0\r\n\r\n")
        return answer is not None and b'"true"' in answer

    def close(self) -> None:
        super().close()
        if hasattr(self, "_peer_port"):
            release(self._peer_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class KubeApiserver(Server):
    """A real kube-apiserver over https, with a static token file, RBAC, and an etcd of its own."""

    install = f"a kube-apiserver, and name it in {PROGRAM}"
    scheme = "kube_apiserver"
    token: ClassVar[str] = "token-of-an-administrator"
    tokens: ClassVar[Mapping[str, tuple[str, str]]] = {
        token: ("admin", "system:masters"),
        "token-of-nobody": ("nobody", "nobodies"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.authority = Authority()
        self._store = _Store()

    @classmethod
    def missing(cls) -> str:
        program = os.environ.get(PROGRAM)
        if not program:
            return f"{PROGRAM} names no kube-apiserver"
        if shutil.which(program) is None:
            return f"{PROGRAM}={program} is no program"
        return "" if shutil.which("etcd") else "etcd is not installed"

    def prepare(self) -> None:
        self.authority.issue(self.folder)
        rows = (f'{token},{user},{user},"{group}"' for token, (user, group) in self.tokens.items())
        self.write("tokens.csv", "\n".join(rows) + "\n")
        self.run("openssl", "genrsa", "-out", "accounts.key", "2048")

    def launch(self) -> None:
        if not self._store.runs:
            self._store.start()
        super().launch()

    def argv(self) -> Sequence[str]:
        key, certificate = str(self.folder / "server.key"), str(self.folder / "server.pem")
        accounts = str(self.folder / "accounts.key")
        return [
            *[os.environ[PROGRAM], f"--etcd-servers={self._store.url}", "--bind-address=127.0.0.1"],
            *[f"--secure-port={self.port}", f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}"],
            *[f"--token-auth-file={self.folder / 'tokens.csv'}", "--authorization-mode=RBAC"],
            *["--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={accounts}"],
            *[f"--service-account-signing-key-file={accounts}", "--service-cluster-ip-range=10.0.0.0/24"],
            *["--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"],
            *[f"--cert-dir={self.folder}", "--anonymous-auth=true"],
        ]

    def ready(self) -> bool:
        try:
            status, _ = self.ask("GET", "/api/v1/namespaces/default")
            return status == 200
        except (OSError, http.client.HTTPException):
            return False

    def ask(self, method: str, path: str, body: object = None, *, lines: bool = False) -> tuple[int, Any]:
        """Send a request as the administrator; return the status and the body, as text if it is *lines*."""
        return _answer_of(self.port, self.authority, method, path, body, token=self.token, lines=lines)

    def restart_and_forget(self) -> None:
        """Restart it, so that it has no events of before."""
        super().kill()
        self.start()

    def stop(self) -> None:
        super().stop()
        self._store.stop()

    def kill(self) -> None:
        super().kill()
        self._store.kill()

    def close(self) -> None:
        super().close()
        self._store.close()

    def __enter__(self) -> Self:
        return self if self.runs else self.start()

    @property
    def server(self) -> str:
        """Its address, as a kubeconfig has it."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"kubernetes://default?server={self.server}&ca={self.authority.certificate}&token_env={TOKEN_ENV}"


TOKEN_ENV = "TENURE_TEST_KUBERNETES_TOKEN"
"""The environment variable that the URL of a ``KubeApiserver`` names for its token; the tests set it."""
