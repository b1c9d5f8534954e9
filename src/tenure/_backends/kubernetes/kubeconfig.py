"""Kubeconfig files: merged as kubectl does, and the cluster and user of one context."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tenure._backends.kubernetes.credentials import (
    Access,
    Command,
    CommandLogin,
    Credential,
    Login,
    TokenFile,
    TokenText,
    read_file,
    require_server,
    require_version,
)
from tenure._opened import Fact
from tenure._option_files import exists, warnings_about
from tenure._secret import Secret
from tenure.errors import ConfigError, nearest

_REFUSED = {
    "auth-provider": "Kubernetes has removed it; use exec, a credential command",
    "username": "Kubernetes has removed passwords; use a token or a certificate",
    "as": "tenure can't act as another user; give this one the rights",
    "impersonate": "tenure can't act as another user; give this one the rights",
}
"""What a user of a kubeconfig may have, and tenure doesn't support, with the reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A cluster, user or context of a kubeconfig; its paths are relative to the file that has it."""

    name: str
    fields: Mapping[str, Any]
    file: Path

    def path(self, field: str) -> Path | None:
        """Return the path in *field*, if it is there."""
        return self.file.parent / str(self.fields[field]) if self.fields.get(field) else None

    def text(self, field: str) -> str | None:
        """Return what *field*-data has, decoded, or the content of the file that *field* names."""
        data = self.fields.get(f"{field}-data")
        if data:
            try:
                return base64.b64decode(str(data), validate=True).decode()
            except ValueError as error:  # also binascii.Error, and a UnicodeDecodeError
                raise ConfigError(f"{self.file}: {field}-data of {self.name!r} is no base64 of a text") from error
        path = self.path(field)
        return read_file(path, f"{self.file}: {field} of {self.name!r}") if path else None


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """The merged files."""

    files: Sequence[Path]
    current: str
    contexts: Mapping[str, Entry]
    clusters: Mapping[str, Entry]
    users: Mapping[str, Entry]


def read_kubeconfig(paths: Sequence[Path]) -> Kubeconfig:
    """Read and merge *paths*: the first file that has an entry wins, one that doesn't exist is skipped.

    Raises:
        ConfigError: None exists, or one can't be read as YAML.
    """
    found: dict[str, dict[str, Entry]] = {"contexts": {}, "clusters": {}, "users": {}}
    current, files = "", []
    for path in paths:
        if len(paths) > 1 and not exists(path):
            continue
        content = _parsed(path, may_be_empty=len(paths) > 1)
        files.append(path)
        current = current or str(content.get("current-context") or "")
        for kind, entries in found.items():
            for one in _list_in(content, kind, path):
                fields = one.get(kind.removesuffix("s")) or {}
                if "name" not in one or not isinstance(fields, dict):
                    raise ConfigError(f"the kubeconfig {path} has an entry of {kind} without a name, or without fields")
                entries.setdefault(str(one["name"]), Entry(str(one["name"]), fields, path.absolute()))
    if not files:
        raise ConfigError(f"no kubeconfig was found: there is none of {', '.join(map(str, paths))}")
    return Kubeconfig(files, current, found["contexts"], found["clusters"], found["users"])


def _list_in(fields: Mapping[str, Any], name: str, path: Path) -> Sequence[Mapping[str, Any]]:
    found = fields.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"the kubeconfig {path} has {name} that are no list of entries")
    return found


def _parsed(path: Path, *, may_be_empty: bool) -> Mapping[str, Any]:
    text = read_file(path, "the kubeconfig")
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: a number or a date that is none
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"the kubeconfig {path} is no YAML{f' in line {mark.line + 1}' if mark else ''}") from None
    if content is None and may_be_empty:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the kubeconfig {path} is no kubeconfig: it has no clusters, users and contexts")
    return content


def access_of(config: Kubeconfig, wanted: str | None) -> Access:
    """Return the access of the context *wanted*, or of the current one.

    Raises:
        ConfigError: There is no such context, or it has something that tenure doesn't support.
    """
    where = ", ".join(map(str, config.files))
    name = wanted or config.current
    if not name:
        known = ", ".join(sorted(config.contexts)) or "none"
        raise ConfigError(f"the kubeconfig {where} has no current context; add ?context=NAME (known: {known})")
    context = _entry(config.contexts, name, "context", where)
    if not context.fields.get("cluster"):
        raise ConfigError(f"{context.file}: context {name!r} names no cluster")
    cluster = _entry(config.clusters, str(context.fields["cluster"]), "cluster", where)
    user = _entry(config.users, str(context.fields["user"]), "user", where) if context.fields.get("user") else None
    origin = f"the context {name!r} of the kubeconfig {where}"
    server = str(cluster.fields.get("server") or "")
    require_server(server, f"the server of {origin}")
    if cluster.fields.get("proxy-url"):
        raise ConfigError(
            f"{origin} has proxy-url, which tenure doesn't support: a lease needs a connection that fails clearly; "
            "reach the server directly, or by kubectl port-forward or an SSH tunnel"
        )
    return Access(
        origin=origin,
        server=server.rstrip("/"),
        ca=cluster.text("certificate-authority"),
        ca_file=None if cluster.fields.get("certificate-authority-data") else cluster.path("certificate-authority"),
        credential=_credential(user, cluster) if user else None,
        certificate=_certificate(user) if user else None,
        files=(*config.files, *_files(cluster, "certificate-authority"), *_certificate_files(user)),
        namespace=str(context.fields.get("namespace") or "default"),
        is_insecure=cluster.fields.get("insecure-skip-tls-verify") is True,
        server_name=str(cluster.fields["tls-server-name"]) if cluster.fields.get("tls-server-name") else None,
        warnings=_warnings(user) if user else (),
    )


def _entry(entries: Mapping[str, Entry], name: str, kind: str, where: str) -> Entry:
    if name not in entries:
        known = ", ".join(sorted(entries)) or "none"
        raise ConfigError(
            f"the kubeconfig {where} has no {kind} {name!r}{nearest(name, list(entries))} (known: {known})"
        )
    return entries[name]


def _warnings(user: Entry) -> tuple[Fact, ...]:
    """Return a warning for each file with a secret of *user* that others can read."""
    found: tuple[Fact, ...] = ()
    if user.fields.get("token") or user.fields.get("client-key-data"):
        found += warnings_about("kubeconfig", user.file)
    if not user.fields.get("client-key-data") and (key := user.path("client-key")) is not None:
        found += warnings_about("client-key", key)
    return found


def _certificate_files(user: Entry | None) -> tuple[Path, ...]:
    return _files(user, "client-certificate", "client-key") if user else ()


def _files(entry: Entry, *fields: str) -> tuple[Path, ...]:
    """Return the files that *fields* name, but for those whose content the kubeconfig itself has."""
    paths = (entry.path(field) for field in fields if not entry.fields.get(f"{field}-data"))
    return tuple(path for path in paths if path is not None)


def _certificate(user: Entry) -> Login | None:
    certificate, key = user.text("client-certificate"), user.text("client-key")
    if (certificate is None) != (key is None):
        raise ConfigError(f"{user.file}: user {user.name!r} must have both a client-certificate and a client-key")
    return Login(certificate=certificate, key=Secret(key)) if certificate and key else None


def _credential(user: Entry, cluster: Entry) -> Credential | None:
    for field, why in _REFUSED.items():
        if user.fields.get(field):
            raise ConfigError(f"{user.file}: user {user.name!r} has {field}, which can't be used: {why}")
    if (path := user.path("tokenFile")) is not None:
        return TokenFile(path)
    if user.fields.get("token"):
        return TokenText(Secret(str(user.fields["token"])))
    if user.fields.get("exec"):
        return CommandLogin(_command(user, user.fields["exec"], cluster))
    return None


def _command(user: Entry, fields: Any, cluster: Entry) -> Command:
    if not isinstance(fields, dict) or not fields.get("command"):
        raise ConfigError(f"{user.file}: exec of user {user.name!r} names no command")
    if fields.get("interactiveMode") == "Always":
        raise ConfigError(
            f"{user.file}: the credential command of user {user.name!r} must be run at a terminal "
            "(interactiveMode: Always); use a user with another credential"
        )
    program = str(fields["command"])
    if "/" in program:  # relative to the file, as for kubectl; a plain name is searched in PATH
        program = str(user.file.parent / program)
    told = None
    if fields.get("provideClusterInfo"):
        names = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data")
        given = {name: cluster.fields[name] for name in names if cluster.fields.get(name)}
        told = {name: one if isinstance(one, bool) else str(one) for name, one in given.items()}
    env = {str(one.get("name")): str(one.get("value")) for one in _list_in(fields, "env", user.file)}
    arguments = fields.get("args") or []
    if not isinstance(arguments, list):
        raise ConfigError(f"{user.file}: exec of user {user.name!r} has args that are no list")
    argv = [program, *map(str, arguments)]
    return Command(require_version(fields.get("apiVersion")), argv, env, str(fields.get("installHint") or ""), told)
