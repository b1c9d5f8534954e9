"""The address of an Azure Storage account and its credential: from a URL, a connection string, or the environment.

Secrets belong into the environment. None is ever shown: a field that can hold one is not part of the ``repr``.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from urllib.parse import urlsplit

from tenure._azure_emulators import may_be_emulator
from tenure._logins import PasswordOptions, Source, names_only_source
from tenure._secret import Secret
from tenure._url import Url, is_loopback, require_host, secret_in
from tenure.errors import ConfigError

DEVELOPMENT_ACCOUNT = "devstoreaccount1"
DEVELOPMENT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and the key of every Azurite: well known, not secret."""

_SAS = frozenset(
    "sv ss srt sp se st spr sip sr si sig ses sdd skoid sktid skt ske sks skv saoid suoid scid".split()  # noqa: SIM905
)
"""The parameters of a shared access signature, which may be in a URL's query, as the portal writes them."""


@dataclass(frozen=True, slots=True)
class Options(PasswordOptions):
    """The query of an ``azure:`` or ``azurite:`` URL. The password is the account's key, or a signature.

    Args:
        container: The container of the lease blobs.
        timeout: Seconds that a request may take.
        connection_string_env: The environment variable that holds a connection string.
        key_env: The environment variable that holds the account's key.
        sas_env: The environment variable that holds a shared access signature.
        endpoint_suffix: The end of the account's host names, which differs between clouds.
        queue_port: Azurite's port for queues; by default, one more than that for blobs.
    """

    container: str = "leases"
    timeout: float = 5.0
    connection_string_env: str | None = None
    key_env: str | None = None
    sas_env: str | None = None
    endpoint_suffix: str = "core.windows.net"
    queue_port: int | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", self.container):
            raise ConfigError(
                f"container must be 3 to 63 small letters, digits and single hyphens, not {self.container!r}; "
                "try container=leases"
            )
        if not 0.1 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.1 to 60 seconds, not {self.timeout:g}; try timeout=5")
        if len(self.secrets) > 1:
            raise ConfigError(f"{' and '.join(self.secrets)} can't both be given; keep one of them")
        if self.queue_port is not None and not 0 < self.queue_port < 65_536:
            raise ConfigError(f"queue_port must be a port, not {self.queue_port}")

    @property
    def secrets(self) -> list[str]:
        """The options that name a variable with a secret."""
        return [name for name in ("connection_string_env", "key_env", "sas_env") if getattr(self, name)]


@dataclass(frozen=True, slots=True)
class Address:
    """The two services of an account, and the key or the signature; with neither, the identity of the process.

    Unless the login comes from elsewhere: see :mod:`tenure._backends.azure_storage.login`.
    """

    account: str
    blobs: str
    queues: str
    key: Secret | None = None
    sas: Secret | None = None

    @property
    def servers(self) -> str:
        """Host and port of both services, for a message."""
        parts = [urlsplit(one) for one in (self.blobs, self.queues) if one]
        return " or ".join(dict.fromkeys(one.netloc if one.port else f"{one.netloc}:443" for one in parts))

    @property
    def login(self) -> str:
        """The kind of its credential."""
        return "account key" if self.key else "shared access signature" if self.sas else "identity"


def address_of(
    url: Url, env: Mapping[str, str] = MappingProxyType(os.environ), *, given: Source | None = None
) -> tuple[Address, Options]:
    """Return the account that *url* names, and the options. With a login from elsewhere, it has none.

    Raises:
        ConfigError: It names no account, an option doesn't fit, or a variable of the environment isn't set.
    """
    signature = _SAS.intersection(url.query) if "sig" in url.query else frozenset()
    plain = replace(url, query={name: value for name, value in url.query.items() if name not in signature})
    options = plain.options(Options)
    if url.user is not None:
        instead = "azurite://HOST:PORT" if url.scheme == "azurite" else "azure://ACCOUNT"
        raise ConfigError(f"{url} must have no login; write {instead}, and see the page on secrets of an account")
    if url.path not in ("", "/"):
        raise ConfigError(f"{url} has a path, which azure: doesn't use; did you mean ?container=…?")
    other = "a signature" if signature else next((f"{one}=" for one in options.secrets), "")
    has_source = names_only_source(url, options, given, other)
    if url.scheme == "azurite":
        return _azurite(url, options, has_source=has_source), options
    if options.queue_port is not None:
        raise ConfigError("queue_port is for azurite:// only; an account has a host name of its own for its queues")
    if signature:
        written = url.written.reveal().partition("?")[2].split("&")
        sas = "&".join(part for part in written if part.partition("=")[0] in signature)
        return replace(_account(url, url.hosts, options), sas=Secret(sas)), options
    if has_source:  # the secrets of the environment are for others
        account = url.hosts or env.get("AZURE_STORAGE_ACCOUNT", "")
        return _account(url, account, options, has_source=True), options
    return _with_secret(url, options, env), options


def _azurite(url: Url, options: Options, *, has_source: bool = False) -> Address:
    try:
        host, _, port = url.hosts.partition(":")
        blob_port = int(port or 10_000)
    except ValueError:
        raise ConfigError(f"{url} has a port that is no number; write azurite://127.0.0.1:10000") from None
    if not host:
        raise ConfigError(f"{url} must have a host, and no login; write azurite://127.0.0.1:10000")
    if has_source and not may_be_emulator(host, has_known_key=False):
        raise ConfigError(
            f"{url} is asked without TLS, and anybody on the way could read a signature; write azure://ACCOUNT (only a "
            "host of a private network may be an Azurite with a login of its own)"
        )
    if not may_be_emulator(host, has_known_key=True):
        raise ConfigError(f"{url} names a host of Azure as an emulator, without TLS; write azure://ACCOUNT")
    queue_port = options.queue_port or blob_port + 1
    blobs, queues = (f"http://{host}:{each}/{DEVELOPMENT_ACCOUNT}" for each in (blob_port, queue_port))
    return Address(DEVELOPMENT_ACCOUNT, blobs, queues, None if has_source else Secret(DEVELOPMENT_KEY))


def _account(url: Url, name: str, options: Options, *, has_source: bool = False) -> Address:
    # The whole host name is accepted, too: the portal shows it.
    account, dot, rest = name.partition(".")
    suffix = options.endpoint_suffix
    if dot:
        service, _, suffix = rest.partition(".")
        if service not in ("blob", "queue") or not suffix:
            raise ConfigError(f"{url} is no account; write azure://ACCOUNT, or azure://ACCOUNT.blob.core.windows.net")
    if not re.fullmatch(r"[a-z0-9]{3,24}", account):
        alone = "" if has_source else ", or azure: alone with AZURE_STORAGE_CONNECTION_STRING in the environment"
        raise ConfigError(f"{url} has no account of 3 to 24 small letters and digits; write azure://ACCOUNT{alone}")
    return Address(account, f"https://{account}.blob.{suffix}", f"https://{account}.queue.{suffix}")


def _with_secret(url: Url, options: Options, env: Mapping[str, str]) -> Address:
    if options.connection_string_env:
        return _checked(url, connected(secret_in(env, "connection_string_env", options.connection_string_env)))
    if not url.hosts and (text := env.get("AZURE_STORAGE_CONNECTION_STRING")):
        return _checked(url, connected(Secret(text)))  # the variable that Microsoft's own tools read
    found = _account(url, url.hosts or env.get("AZURE_STORAGE_ACCOUNT", ""), options)
    if options.key_env:
        return replace(
            found, key=_key(secret_in(env, "key_env", options.key_env), f"the environment variable {options.key_env}")
        )
    if options.sas_env:
        return replace(found, sas=_signature(secret_in(env, "sas_env", options.sas_env), options.sas_env))
    if not url.hosts:
        sas = env.get("AZURE_STORAGE_SAS_TOKEN", "").lstrip("?")
        key = Secret(env.get("AZURE_STORAGE_KEY", "").strip())
        found = replace(found, sas=Secret(sas) if sas else None)
        return replace(found, key=_key(key, "the environment variable AZURE_STORAGE_KEY")) if key else found
    return found


def _key(key: Secret, where: str) -> Secret:
    """Return an account's key, if it can be one."""
    try:
        base64.b64decode(key.reveal(), validate=True)
    except ValueError:
        raise ConfigError(
            f"{where} holds no account key, which is base64; copy the whole key from the account's access keys"
        ) from None
    return key


def _signature(given: Secret, name: str) -> Secret:
    """Return a shared access signature, if it can be one."""
    if "sig=" not in given.reveal():
        raise ConfigError(
            f"the environment variable {name} holds no shared access signature: sig=… is missing; copy it whole"
        )
    return Secret(given.reveal().lstrip("?"))


def _checked(url: Url, found: Address) -> Address:
    if url.hosts and url.hosts.partition(".")[0] != found.account:
        raise ConfigError(
            f"{url} names the account {url.hosts!r}, and the connection string {found.account!r}; remove one of them"
        )
    return found


def connected(given: Secret) -> Address:
    """Return the account that a connection string names.

    Raises:
        ConfigError: It is not a connection string; the error doesn't quote it.
    """
    parts = {}
    for part in filter(None, (part.strip() for part in given.reveal().split(";"))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("the connection string can't be read: it must consist of NAME=VALUE, separated by ';'")
        parts[name.strip().lower()] = value.strip()
    if parts.get("usedevelopmentstorage", "").lower() == "true":
        return _azurite(Url.parse("azurite://127.0.0.1:10000"), Options())
    account = parts.get("accountname", "")
    protocol, suffix = parts.get("defaultendpointsprotocol", "https"), parts.get("endpointsuffix", "core.windows.net")
    blobs = parts.get("blobendpoint") or (f"{protocol}://{account}.blob.{suffix}" if account else "")
    queues = parts.get("queueendpoint") or (f"{protocol}://{account}.queue.{suffix}" if account else "")
    key, sas = parts.get("accountkey"), parts.get("sharedaccesssignature", "").lstrip("?")
    are_endpoints = all(_is_endpoint(one) for one in (blobs, queues) if one)
    if not are_endpoints or (account and not re.fullmatch(r"[A-Za-z0-9-]{1,63}", account)):
        raise ConfigError(
            "the connection string has an account or an endpoint that is none (not shown, as a ';' may be missing "
            "after it); copy the whole string from the account's access keys"
        )
    for one in filter(None, (blobs, queues)):
        require_host(urlsplit(one).hostname or "", "the connection string", "copy it from the account's access keys")
    in_clear = [one for one in (blobs, queues) if one.startswith("http://") and not _may_be_in_clear(one, account, key)]
    if in_clear:
        raise ConfigError(
            f"the connection string asks for {in_clear[0]}, which anybody on the way can read, a signature too; write "
            "DefaultEndpointsProtocol=https, or https:// in its endpoints (only devstoreaccount1 may be an emulator, "
            "by its well-known key, or on a private network)"
        )
    if not (blobs or queues) or not (key or sas) or (key and not account):
        raise ConfigError(
            "the connection string is incomplete: it needs AccountName and AccountKey, or SharedAccessSignature with "
            "AccountName or BlobEndpoint and QueueEndpoint"
        )
    account = account or re.sub(r"^\w+://", "", blobs or queues).partition(".")[0]
    blobs, queues = blobs.rstrip("/"), queues.rstrip("/")
    if key:
        return Address(account, blobs, queues, _key(Secret(key), "the AccountKey of the connection string"))
    return Address(account, blobs, queues, sas=Secret(sas))


def _is_endpoint(text: str) -> bool:
    try:
        _ = urlsplit(text).port
    except ValueError:  # of an address in brackets, or of the port
        return False
    return re.fullmatch(r"https?://[\w.:\[\]/-]+", text) is not None


def _may_be_in_clear(endpoint: str, account: str, key: str | None) -> bool:
    """Whether *endpoint* is on this machine, or is that of an emulator."""
    host = urlsplit(endpoint).hostname or ""
    is_development = account == DEVELOPMENT_ACCOUNT
    return is_loopback(host) or (is_development and may_be_emulator(host, has_known_key=key == DEVELOPMENT_KEY))
