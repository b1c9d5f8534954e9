"""The address of a Service Bus namespace and its credential: from a URL, a connection string, or the environment.

Secrets belong into the environment. None is ever shown: a field that can hold one is not part of the ``repr``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import parse_qs

from tenure._azure_emulators import may_be_emulator
from tenure._logins import PasswordOptions, Source, names_only_source
from tenure._secret import Secret
from tenure._url import Url, require_host, secret_in
from tenure.errors import ConfigError

VARIABLE = "AZURE_SERVICEBUS_CONNECTION_STRING"
"""The environment variable that is read where the URL names neither a namespace nor a variable."""

EMULATOR_KEY = "SAS_KEY_VALUE"
"""The key of every emulator: well known, not secret."""


@dataclass(frozen=True, slots=True)
class Options(PasswordOptions):
    """The query of a ``servicebus:`` URL.

    Args:
        create: Whether queues that are missing are created, and may be changed and deleted. It needs the right Manage.
        timeout: Seconds that a request may take.
        connection_string_env: The environment variable that holds a connection string.
        lock: The lock duration of the queues in seconds, where this process may not read it (no right Manage).
        max_deliveries: Their MaxDeliveryCount, where this process may not read it; None: 10, as the service has it.
        emulator: Whether the address is that of the official emulator, with its well-known key; it has no TLS.
        admin_port: The emulator's port for management.
        endpoint_suffix: The end of the namespace's host name, which differs between clouds.
    """

    create: bool = False
    timeout: float = 10.0
    connection_string_env: str | None = None
    lock: float | None = None
    max_deliveries: int | None = None
    emulator: bool = False
    admin_port: int = 5300
    endpoint_suffix: str = "servicebus.windows.net"

    def __post_init__(self) -> None:
        if not 0.1 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.1 to 60 seconds, not {self.timeout:g}; try timeout=10")
        if self.lock is not None and not 5.0 <= self.lock <= 300.0:
            raise ConfigError(f"lock must be from 5 to 300 seconds, not {self.lock:g}; give that of the queue")
        if self.max_deliveries is not None and not 1 <= self.max_deliveries <= 2_000:
            raise ConfigError(f"max_deliveries must be from 1 to 2,000, not {self.max_deliveries:,}; give the queue's")
        if not 0 < self.admin_port < 65_536:
            raise ConfigError(f"admin_port must be a port, not {self.admin_port}")


@dataclass(frozen=True, slots=True)
class Address:
    """A namespace, and its connection string; without one, the identity of the process is used."""

    host: str
    """With a port if it is an emulator."""
    connection_string: Secret | None = None
    emulator: bool = False
    policy: str | None = None
    """The name of the shared access policy."""
    key: Secret | None = None
    """The key that is in the connection string, or the secret part of the signature."""
    has_source: bool = False
    """Whether keys or signatures come from elsewhere than the URL and the environment."""

    @property
    def name(self) -> str:
        """The host without its port; of IPv6, without brackets."""
        before, bracket, _ = self.host.partition("]")
        return before.lstrip("[") if bracket else before.partition(":")[0]

    @property
    def login(self) -> str:
        """The kind of its credential."""
        if self.has_source:
            return f"policy {self.policy}" if self.policy else "shared access signature, or policy"
        if self.connection_string is None:
            return "identity"
        return f"policy {self.policy}" if self.policy else "shared access signature"


def address_of(
    url: Url, env: Mapping[str, str] = MappingProxyType(os.environ), given: Source | None = None
) -> tuple[Address, Options]:
    """Return the namespace that *url* names, and the options; *given* are credentials of the caller.

    Raises:
        ConfigError: It names no namespace, an option doesn't fit, or a variable of the environment isn't set.
    """
    options = url.options(Options)
    if url.path not in ("", "/"):
        raise ConfigError(f"{url} has a path, which servicebus: doesn't use; name the queue in backend.queue(…)")
    other = "connection_string_env=" if options.connection_string_env else ""
    has_source = names_only_source(url, options, given, other)
    if url.password is not None:
        raise ConfigError(
            f"{url} must have no password; "
            + ("leave it out" if has_source else f"put a connection string into the environment variable {VARIABLE}")
        )
    if url.user is not None and not has_source:
        raise ConfigError(
            f"{url} must have no login; write servicebus: alone, with a connection string in the environment variable "
            f"{VARIABLE}, or say where the key of this policy is: password_file=, password_command= or credentials="
        )
    policy = url.user.reveal() if url.user is not None else None
    if has_source:
        if not options.emulator:
            return Address(_host(url, options, has_source=True), policy=policy, has_source=True), options
        host = url.hosts or "127.0.0.1"
        found = Address(host, None, True, policy, has_source=True)
        if not may_be_emulator(found.name, has_known_key=False):
            raise ConfigError(
                f"{host} is to be asked without TLS, as an emulator, and anybody on the way could read a signature; "
                "remove emulator=yes (only a host of a private network may be an emulator)"
            )
        return found, options
    if options.emulator:
        host = url.hosts or "127.0.0.1"
        key = f"SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey={EMULATOR_KEY}"
        return connected(Secret(f"Endpoint=sb://{host};{key};UseDevelopmentEmulator=true")), options
    if options.connection_string_env:
        return _checked(url, connected(secret_in(env, "connection_string_env", options.connection_string_env))), options
    if not url.hosts:
        return connected(secret_in(env, f"{url}, which names no namespace,", VARIABLE)), options
    return Address(_host(url, options)), options


def _host(url: Url, options: Options, *, has_source: bool = False) -> str:
    name, dot, _ = url.hosts.partition(".")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{4,48}[A-Za-z0-9]", name):
        alone = "" if has_source else f", or servicebus: alone with {VARIABLE} in the environment"
        raise ConfigError(
            f"{url} has no namespace of 6 to 50 letters, digits and hyphens; write servicebus://NAMESPACE{alone}"
        )
    return url.hosts if dot else f"{name}.{options.endpoint_suffix}"


def _checked(url: Url, found: Address) -> Address:
    if url.hosts and url.hosts.partition(".")[0].lower() != found.host.partition(".")[0].lower():
        raise ConfigError(
            f"{url} names the namespace {url.hosts!r}, and the connection string {found.host!r}; remove one of them"
        )
    return found


def connected(given: Secret) -> Address:
    """Return the namespace that a connection string names.

    The library gets a text of what was understood here: its own parser knows further words, and prefers others.

    Raises:
        ConfigError: It is not a connection string (the error doesn't quote it), or names an emulator that can't be one.
    """
    parts = {}
    for part in filter(None, (part.strip() for part in given.reveal().split(";"))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("the connection string can't be read: it must consist of NAME=VALUE, separated by ';'")
        parts[name.strip().lower()] = value.strip()
    host = re.sub(r"^\w+://", "", parts.get("endpoint", "")).strip("/")
    policy, key, signature = (
        parts.get(name) for name in ("sharedaccesskeyname", "sharedaccesskey", "sharedaccesssignature")
    )
    if not host or not ((policy and key) or signature):
        raise ConfigError(
            "the connection string is incomplete: it needs Endpoint, and SharedAccessKeyName with SharedAccessKey, or "
            "SharedAccessSignature"
        )
    if not re.fullmatch(r"[\w.:\[\]-]+", host):
        raise ConfigError(
            "the connection string has an Endpoint that is none (not shown, as a ';' may be missing after it); copy "
            "the whole string from the namespace's policies"
        )
    if "entitypath" in parts:
        raise ConfigError(
            f"the connection string is for the queue {parts['entitypath']!r} alone; use that of the namespace, or an "
            "identity with rights for this queue"
        )
    is_emulator = parts.get("usedevelopmentemulator", "").lower() == "true"
    login = f"SharedAccessKeyName={policy};SharedAccessKey={key}"
    if not (policy and key):
        policy, login = None, f"SharedAccessSignature={signature}"
    written = f"Endpoint=sb://{host}/;{login}{';UseDevelopmentEmulator=true' if is_emulator else ''}"
    secret = key or parse_qs(signature or "").get("sig", [signature or ""])[0]
    found = Address(host, Secret(written), is_emulator, policy, Secret(secret))
    require_host(found.name, "the connection string", "copy it from the namespace's policies")
    if is_emulator and not may_be_emulator(found.name, has_known_key=key == EMULATOR_KEY):
        raise ConfigError(
            f"{host} is to be asked without TLS, as an emulator, and anybody on the way could read that, a signature "
            "too; remove UseDevelopmentEmulator=true, or emulator=yes (only a host of a private network, or one with "
            "the emulator's own key, may be an emulator)"
        )
    return found
