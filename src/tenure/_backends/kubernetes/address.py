"""The URL of a namespace, and where the API server of its cluster is found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from tenure._backends.kubernetes.credentials import (
    Access,
    TokenFile,
    TokenText,
    read_file,
    require_server,
    require_verified,
)
from tenure._backends.kubernetes.kubeconfig import access_of, read_kubeconfig
from tenure._backends.kubernetes.names import is_namespace
from tenure._option_files import exists
from tenure._url import Url, secret_in
from tenure.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token of its service account, the authority of the API server, and its namespace."""


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``kubernetes:`` URL.

    Args:
        context: The context of the kubeconfig, instead of its current one.
        kubeconfig: The path of a kubeconfig, instead of ``$KUBECONFIG``, the pod's service account or
            ``~/.kube/config``.
        server: The address of an API server, such as ``https://127.0.0.1:6443``, instead of any of these.
        token_env: The environment variable that holds a bearer token (with *server* only).
        ca: A file with the certificates to trust, instead of the system's (with *server* only).
        timeout: Seconds that a request may take, connecting included.
        watches: The most names that this process watches, each over a connection of its own; others are polled.
    """

    context: str | None = None
    kubeconfig: str | None = None
    server: str | None = None
    token_env: str | None = None
    ca: str | None = None
    timeout: float = 5.0
    watches: int = 100

    def __post_init__(self) -> None:
        if not 0.1 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.1 to 60 seconds, not {self.timeout:g}; try timeout=5")
        if not 0 <= self.watches <= 10_000:
            raise ConfigError(f"watches must be from 0 to 10000, not {self.watches}; try watches=100")
        for name in ("token_env", "ca"):
            if getattr(self, name) is not None and self.server is None:
                raise ConfigError(f"{name} is only for a server that the URL names; add server=https://HOST:PORT")
        for name in ("context", "kubeconfig"):
            if getattr(self, name) is not None and self.server is not None:
                raise ConfigError(f"{name} and server can't both be given: a kubeconfig names its own server")


@dataclass(frozen=True, slots=True)
class Address:
    """A namespace, and the access to its API server."""

    namespace: str
    access: Access


def address_of(
    url: Url, options: Options, env: Mapping[str, str] = MappingProxyType(os.environ), account: Path = SERVICE_ACCOUNT
) -> Address:
    """Return the namespace that *url* names, and how to reach it.

    Raises:
        ConfigError: It names no namespace, there is no cluster to be found, or a file of it can't be read.
    """
    if url.path not in ("", "/"):
        raise ConfigError(f"{str(url)!r} has a path; write kubernetes://NAMESPACE, and name the election separately")
    if url.user is not None or (url.hosts and not is_namespace(url.hosts)):
        raise ConfigError(
            f"{str(url)!r} names no namespace: it must be 1 to 63 small letters, digits and '-'; write "
            "kubernetes://NAMESPACE?server=https://HOST:PORT if you mean a server"
        )
    access = replace(require_verified(_access(options, env, account)), again=partial(_access, options, env, account))
    namespace = url.hosts or access.namespace
    if not namespace and options.server is not None:
        raise ConfigError(f"{str(url)!r} names no namespace; add one to the URL: kubernetes://NAMESPACE?server=…")
    if not namespace:
        raise ConfigError(f"{str(url)!r} names no namespace, and neither does {access.origin}; add one to the URL")
    if not is_namespace(namespace):
        raise ConfigError(f"{access.origin} has {namespace!r} as its namespace, which no namespace can be called")
    return Address(namespace, access)


def _access(options: Options, env: Mapping[str, str], account: Path) -> Access:
    if options.server is not None:
        return _named_server(options.server, options, env)
    home = Path(env.get("HOME") or os.path.expanduser("~"), ".kube", "config")
    named = options.kubeconfig or env.get("KUBECONFIG", "")
    # A user without a home keeps the ~: then there is no such file.
    paths = [Path(os.path.expanduser(each)) for each in named.split(os.pathsep) if each]
    in_cluster = bool(env.get("KUBERNETES_SERVICE_HOST")) and exists(account / "token")
    if not paths and options.context is None and in_cluster:
        return _service_account(env, account)
    if not paths and not exists(home):
        raise ConfigError(
            f"no Kubernetes cluster was found: this is no pod with a service account, KUBECONFIG is not set, and there "
            f"is no {home}; set KUBECONFIG, or write ?server=https://HOST:PORT&token_env=NAME"
        )
    return access_of(read_kubeconfig(paths or [home]), options.context)


def _named_server(server: str, options: Options, env: Mapping[str, str]) -> Access:
    require_server(server, "the option server")
    credential = None
    if options.token_env is not None:
        credential = TokenText(secret_in(env, "token_env", options.token_env))
    return Access(
        origin="the URL",
        server=server.rstrip("/"),
        ca=read_file(Path(options.ca), "the option ca") if options.ca else None,
        ca_file=Path(options.ca) if options.ca else None,
        files=(Path(options.ca),) if options.ca else (),
        credential=credential,
    )


def _service_account(env: Mapping[str, str], account: Path) -> Access:
    host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    namespace = account / "namespace"
    return Access(
        origin="this pod's service account",
        server=f"https://{host}:{port}",
        ca=read_file(account / "ca.crt", "this pod's service account"),
        ca_file=account / "ca.crt",
        files=(account / "ca.crt",),
        credential=TokenFile(account / "token"),
        namespace=read_file(namespace, "its namespace").strip() if exists(namespace) else "",
    )
