"""URLs of backends: parsed once, options checked and typed, secrets never shown.

What is shown of a URL is put together from parts that were understood, and that hold no secret: the hosts, the path,
and the options in ``SHOWN``. Of what can't be parsed, nothing is shown but the scheme.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tenure._secret import HIDDEN, Secret, path_shown
from tenure.errors import ConfigError, nearest

Options = TypeVar("Options")

_SCHEME = re.compile(r"[a-z][a-z0-9+]{0,30}\Z")
_PARTS = re.compile(r"(?P<scheme>[^:/?#]+):(?P<slashes>//)?(?P<netloc>(?(slashes)[^/?#]*))(?P<rest>.*)", re.DOTALL)
_SECOND = re.compile(r"[^/?#]*//[^/?#]*[,;][a-z][a-z0-9+]*://")
"""A scheme before the second server, too."""
_PLACEHOLDER = re.compile(
    r"//[^/?#@\[<{]*:(?:\*{3,}|\[[\w -]*(?:pass|pw)[\w -]*\]|<[\w -]*(?:pass|pw)[\w -]*>|\{[\w -]*(?:pass|pw)[\w -]*\}|"
    r"show-password)@",
    re.IGNORECASE,
)
"""Where a service shows no password: it is masked, or to be written by hand."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,39}\Z")
_PLACE = re.compile(r"(?P<host>\[[\w.:%-]+\]|[\w.%-]*)(?::(?P<port>[0-9]{0,5}))?")
"""A host and a port, both of which a URL may lack."""
_HOSTS = re.compile(r"[\w.:,%\[\]-]*")
_MIXED = re.compile(r"[=;&\s]")
"""What no path has, but a connection string, or options that are written in the wrong place."""
_WORDS = re.compile(r"[=;&]")
"""Likewise, of values."""
_DRIVE = re.compile(r"/+[A-Za-z]:")
_NUMBER = re.compile(r"/?[0-9]*/?")
_PLAIN = re.compile(r"[\w.+-]{0,40}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}\Z")
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

_FILES = frozenset({"sqlite", "memory"})
"""Schemes whose path is a name that may have an @ in it."""

_USERS = frozenset({"postgresql", "postgres"})
"""Schemes where a login without a password is a user. Elsewhere it may be a token, or a password in the wrong place."""

_LOGINS = _USERS | {
    *("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+unix", "redis+socket", "unix"),
    *("nats", "amqp", "amqps", "etcd", "etcds", "zookeeper"),
}
"""Schemes where a login has a user and a password."""

SCHEMES = _FILES | _LOGINS | {"azure", "azurite", "servicebus", "kubernetes", "peers"}
"""All schemes. Of a URL with another one, nothing is shown."""

_ANYWHERE = re.compile(
    rf"((?:{'|'.join(map(re.escape, SCHEMES))}):(?=.*[@=;])|[a-z][a-z0-9+]*:(?://|\?))", re.IGNORECASE
)
"""How a URL begins, or what others write in its place."""

_OF_OTHERS = frozenset(
    """
    auth_mechanism blocked_connection_timeout channel_binding channel_max client_encoding client_name
    connection_attempts connection_timeout decode_responses encoding fallback_application_name family frame_max
    gssencmode health_check_interval keepalives keepalives_count keepalives_idle keepalives_interval
    load_balance_hosts locale name pgbouncer protocol retry_delay retry_on_timeout server_name_indication
    socket_timeout ssl_cert_reqs sslcompression sslsni stack_timeout supa tcp_user_timeout uselibpqcompat verify
    virtual_host
    """.split()  # noqa: SIM905
)
"""Options of other clients, of which most change nothing. None of their values has an @."""

SHOWN = _OF_OTHERS | frozenset(
    """
    acl admin_port application_name auth busy ca cert check_hostname cluster connect_timeout connections
    consumer_timeout container context create creds db dbname dialect dns domain emulator endpoint_suffix gsslib
    heartbeat host inbox insecure key_file kind krbsrvname kubeconfig lease_prefix listen lock max_deliveries me
    options passfile password_file patience pool port prefix prepared queue_port quorum replicas schema sentinel_tls
    sentinel_user server service ssl_max_protocol_version ssl_min_protocol_version sslcert sslcrl sslkey sslmode
    sslnegotiation sslrootcert strategy synchronous target_session_attrs tick timeout tls tls_ca tls_cert
    tls_key ttl_max user username watches
    """.split()  # noqa: SIM905
)
"""The options whose values are shown."""

HIDDEN_OPTIONS = frozenset({"key", "nkey", "password", "password_command", "sentinel_password", "sig", "sslpassword"})
"""Options whose values are not shown, as those of unknown options are not.

``key`` and ``nkey`` name files; but who takes them for the key itself writes that. A command may have a secret.
"""

_LOGIN_OPTIONS = frozenset({"acl", "auth", "sentinel_user", "user", "username"})
"""Options in which others write user:password."""

_FILE_OPTIONS = frozenset(
    """
    ca cert creds key_file kubeconfig passfile password_file sslcert sslcrl sslkey sslrootcert tls_ca tls_cert tls_key
    """.split()  # noqa: SIM905
)
"""Options in which others write the secret itself, in place of the file that holds it."""

_NUMBERED = frozenset({"redis", "rediss"})
"""Schemes whose path is a number: another one is the end of a password without the host."""

SOURCES = frozenset({"password_command", "password_file"})
"""Options that say where a password is, for stores that have passwords."""

VARIABLES = frozenset({"connection_string_env", "key_env", "sas_env", "token_env"})
"""Options that name an environment variable: shown if it can be one, and not if it may be the secret itself."""


@dataclass(frozen=True, slots=True)
class Url:
    """A backend's address, parsed; neither ``str()`` nor ``repr()`` of it shows a secret.

    ``path`` is as written (for SQLite, what follows the third slash); ``query`` holds the options, still as text.
    """

    scheme: str
    """What stands before the first colon: it chooses the backend."""
    user: Secret | None
    """What stands before the @, or before the colon there, percent-decoded: a user, or a token. None without an @."""
    password: Secret | None
    """What stands between that colon and the @, percent-decoded. None without such a colon."""
    hosts: str
    """Hosts and ports, as written: what follows the slashes, or the @."""
    path: str
    query: Mapping[str, Secret]
    written: Secret
    """The whole text, as it was given."""
    shown: str
    """The text without its secrets: what may be logged. It is what was given if there is no secret in it."""

    @classmethod
    def parse(cls, written: str) -> Url:
        """Parse *written*.

        Raises:
            ConfigError: It isn't of the form ``scheme:…``, or an option is given twice. The error shows no secret, and
                nothing of a text that can't be parsed.
        """
        if not isinstance(written, str):
            raise ConfigError(f"a backend's URL must be text such as 'sqlite:///work.db', not {type(written).__name__}")
        scheme, colon, _ = written.partition(":")
        if scheme not in SCHEMES:
            from tenure._pasted import refusal_of_form

            if (refusal := refusal_of_form(written)) is not None:
                raise ConfigError(refusal)
        if not colon or not _SCHEME.match(scheme):
            raise ConfigError(
                "what was given is not the URL of a backend (and not shown, as it may hold a secret): it must begin "
                "with a scheme; write for example sqlite:///work.db or memory:"
            )
        unread = f"{scheme}:{HIDDEN}"
        if _PLACEHOLDER.search(written):
            raise ConfigError(
                f"{unread!r} has a placeholder, or a mask, where the password is; write the password there"
            )
        if _SECOND.match(written):
            if scheme not in SCHEMES:
                from tenure._pasted import refusal_of_scheme

                raise ConfigError(refusal_of_scheme(scheme, SCHEMES))
            raise ConfigError(
                f"{unread!r} has a scheme before each of its servers; write it once, as in "
                f"{scheme}://HOST:PORT,HOST2:PORT"
            )
        if "#" in written:
            raise ConfigError(f"{unread!r} has a '#', which would end the address; write it as %23")
        try:
            if _CONTROL.search(written):
                raise ValueError
            parts = _split(written)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            # Without the cause: that error may quote a part of the password.
            raise ConfigError(
                f"{unread!r} can't be read as a URL; percent-encode special characters in names and "
                "passwords, and write options as ?name=value&name=value"
            ) from None
        if (parts.netloc and "@" in parts.path) or any(map(_is_unclear, parts.query.split("&"))):
            raise ConfigError(
                f"{unread!r} has an @ after the address; percent-encode a / or ? of the password as %2F or %3F, and "
                "any other @ as %40"
            )
        if any("+" in option and option.partition("=")[0] in HIDDEN_OPTIONS for option in parts.query.split("&")):
            raise ConfigError(
                f"{unread!r} has a + in the value of an option that holds a secret, and some read that as a space; "
                "write a + as %2B, and a space as %20"
            )
        login, at, hosts = parts.netloc.rpartition("@")
        if not _HOSTS.fullmatch(hosts):
            raise ConfigError(
                f"{unread!r} has a server that is no host:port; percent-encode the special characters of the password"
            )
        if scheme not in _FILES and _MIXED.search(parts.path):
            raise ConfigError(
                f"{unread!r} has options, or a connection string, where its path is; write a URL, with its options "
                "after a ?, as in ?name=value&name=value"
            )
        user, colon, password = login.partition(":")
        query: dict[str, Secret] = {}
        for name, value in pairs:
            if name in query:
                named = f"the option {name!r}" if name in _KNOWN else "an option"
                raise ConfigError(f"{named} is given twice in {unread!r}; give it once")
            query[name] = Secret(value)
        return cls(
            scheme,
            Secret(unquote(user)) if at else None,
            Secret(unquote(password)) if colon else None,
            hosts,
            parts.path,
            query,
            Secret(written),
            _shown(written, scheme, parts),
        )

    def options(self, kind: type[Options]) -> Options:
        """Build the dataclass *kind* from the query: each field an option, its annotation the type, its default kept.

        Its ``ELSEWHERE``, if it has one, says what to write in place of options of other clients.

        Raises:
            ConfigError: An option is unknown (the nearest known one is named), or its value doesn't fit.
        """
        fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        elsewhere: Mapping[str, str] = getattr(kind, "ELSEWHERE", {})
        given: dict[str, Any] = {}
        for name, value in self.query.items():
            if name not in fields:
                if name in SOURCES:
                    raise ConfigError(f"{self.scheme} has no passwords, so {name}= is of no use; leave it out")
                if name in elsewhere:
                    raise ConfigError(f"{self.scheme} has no option {name!r}: {elsewhere[name]}")
                raise ConfigError(self._unknown(name, sorted(fields)))
            given[name] = _typed(name, value, fields[name].type)
        return kind(**given)

    def _unknown(self, name: str, known: list[str]) -> str:
        """Return that there is no option *name*; the name is shown, unless it may be a part of a secret."""
        listed = ", ".join(known) or "none"
        if not _WORD.match(name) or not HIDDEN_OPTIONS.isdisjoint(self.query):
            return (
                f"{self} has an option that {self.scheme} doesn't know; correct its name, or percent-encode an & in "
                f"the value before it as %26 (known: {listed})"
            )
        return f"{self.scheme} has no option {name!r}{nearest(name, known)} (known: {listed})"

    def with_option(self, name: str, value: str) -> Url:
        """Return the URL with one option more, or with another value of it; it is shown as before."""
        return dataclasses.replace(self, query={**self.query, name: Secret(value)})

    def places(self, port: int, form: str) -> tuple[tuple[str, int], ...]:
        """Return hosts (of IPv6, without brackets) and ports, each once; *port* where none is given.

        Raises:
            ConfigError: One has no host, or another form. The error has *form*, the right one.
        """
        return tuple(dict.fromkeys(self._place(written, port, form) for written in self.hosts.split(",")))

    def place(self, port: int, form: str) -> tuple[str, int]:
        """Return the only host and its port, like :meth:`places`."""
        first, *more = self.places(port, form)
        if more:
            raise ConfigError(f"{str(self)!r} names several hosts, and {self.scheme}: has one; {form}")
        return first

    def _place(self, written: str, port: int, form: str) -> tuple[str, int]:
        if not written:
            raise ConfigError(f"{str(self)!r} names no host, or an empty one; {form}")
        found = _PLACE.fullmatch(written)
        number = int(found["port"] or port) if found else 0
        if not found or not found["host"] or not 0 < number < 65_536:
            # Without the text: it may be part of a password that is not percent-encoded.
            raise ConfigError(
                f"{str(self)!r} has a server that is no host:port; {form}, and percent-encode the special characters "
                "of the password"
            )
        require_host(found["host"], repr(str(self)), form)
        return found["host"].strip("[]"), number

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"Url({self.shown!r})"


def can_be_host(text: str) -> bool:
    """Return whether *text* can be the name of a host: else Python fails before it asks DNS, not with an OSError."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text)


def require_host(text: str, source: str, form: str) -> None:
    """Refuse what can't be the name of a host.

    Raises:
        ConfigError: It can't; the message has *source*, where it is from, and *form*, the right one.
    """
    if not can_be_host(text):
        # Without the text, as above.
        raise ConfigError(
            f"{source} names what can't be the name of a host: its parts, between dots, have from 1 to 63 characters; "
            f"{form}"
        )


def is_loopback(host: str) -> bool:
    """Return whether *host* is this machine by its loopback interface; a name other than ``localhost`` is not asked."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def secret_in(env: Mapping[str, str], option: str, name: str) -> Secret:
    """Return the secret in the environment variable *name*, as *option* of a URL says, or as is usual.

    Raises:
        ConfigError: It is not set. The error shows its name, unless that may be the secret itself.
    """
    text = env.get(name, "").strip()
    if text:
        return Secret(text)
    if _VARIABLE.match(name):
        raise ConfigError(f"the environment variable {name} is not set; {option} says that it holds the secret")
    raise ConfigError(
        f"{option} must name an environment variable that is set, such as MY_SECRET; what it has is not shown, as it "
        "may be the secret itself"
    )


def shown_in(text: str) -> str:
    """Return *text*, which may be a URL or end with one, without the secrets of that."""
    begin = _ANYWHERE.search(text)
    if begin is None:
        return text
    url = text[begin.start() :]
    try:
        shown = Url.parse(url).shown
    except ConfigError:
        shown = f"{begin[1].partition(':')[0]}:{HIDDEN}"
    return text[: begin.start()] + shown


def in_url(host: str, port: int) -> str:
    """Return a host and its port as URLs have them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(written: str) -> SplitResult:
    """Return the parts of a URL, which may name several hosts.

    Newer Pythons' ``urlsplit`` refuses brackets after the first host, as of an IPv6 address in ``etcd://a,[::1]``.

    Raises:
        ValueError: It is no URL.
    """
    found = _PARTS.fullmatch(written)
    if not found:
        raise ValueError
    netloc = found["netloc"]
    if "," not in netloc or "[" not in netloc:
        return urlsplit(written)
    return urlsplit(f"{found['scheme']}://{found['rest']}")._replace(netloc=netloc)


def _shown(written: str, scheme: str, parts: SplitResult) -> str:
    """Return a URL with its secrets replaced by ``***``, or only its scheme where it's unclear what is one."""
    login, at, hosts = parts.netloc.rpartition("@")
    options = parts.query.split("&") if parts.query else []
    are_hosts = not parts.netloc or all(map(_PLACE.fullmatch, hosts.split(",")))
    is_file = scheme in _FILES and ":" not in _DRIVE.sub("", parts.path.rpartition("@")[0], count=1)
    is_path = scheme not in _NUMBERED or _NUMBER.fullmatch(parts.path)
    is_known = scheme in SCHEMES and not _MIXED.search(login.replace(",", " "))
    if not is_known or not are_hosts or not is_path or ("@" in parts.path and not is_file):
        return f"{scheme}:{HIDDEN}"
    address, mark, _ = written.partition("?")
    if at:
        has_source = any(option.partition("=")[0] in SOURCES for option in options)
        address = address.replace(f"//{login}@", f"//{_shown_login(scheme, login, is_user=has_source)}@", 1)
    has_secret = any(option.partition("=")[0] in HIDDEN_OPTIONS for option in options)
    return address + mark + "&".join(_shown_option(option, has_secret=has_secret) for option in options)


def _shown_login(scheme: str, login: str, *, is_user: bool) -> str:
    user, _, password = login.partition(":")
    if "@" in login or scheme not in _LOGINS:
        return HIDDEN
    if password:
        return f"{user}:{HIDDEN}"
    return login if is_user or scheme in _USERS else HIDDEN


def _is_unclear(option: str) -> bool:
    """Whether this may be the end of a password with a ? in it."""
    name, _, value = option.partition("=")
    return "@" in name or ("@" in value and unquote(name) not in _KNOWN - _OF_OTHERS)


def _shown_option(option: str, *, has_secret: bool) -> str:
    name, equals, value = option.partition("=")
    if name not in _KNOWN and (has_secret or not _WORD.match(name)):
        return HIDDEN  # the name may be the rest of a secret with an & in it
    is_shown = name in SHOWN or (name in VARIABLES and _VARIABLE.match(value))
    return option if is_shown and not _may_be_secret(name, value) else f"{name}{equals}{HIDDEN}"


def _may_be_secret(name: str, value: str) -> bool:
    """Whether the value of an option that is shown may have a secret in it, or be one."""
    meant = unquote(value)
    has_login = "@" in (meant if name == "server" else value) or (name in _LOGIN_OPTIONS and ":" in meant)
    is_secret = name in _FILE_OPTIONS and path_shown(meant) == HIDDEN
    is_password = name == "password_file" and "/" not in meant  # as a token, which may have dots
    return has_login or bool(_WORDS.search(meant)) or is_secret or is_password


_KNOWN = SHOWN | HIDDEN_OPTIONS | VARIABLES


def _typed(name: str, value: Secret, annotation: object) -> Any:
    # A class where the module has no "from __future__ import annotations", else its name.
    written = annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")
    kind = written.removesuffix(" | None")
    if kind == "Secret":
        return value
    text = value.reveal()
    try:
        if kind == "bool":
            return _BOOLS[text.lower()]
        if kind == "int":
            return int(text)
        if kind == "float" and math.isfinite(float(text)):
            return float(text)
    except (KeyError, ValueError) as error:
        expected = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise ConfigError(f"the option {name!r} must be {expected}, not {_quoted(text)}") from error
    if kind == "float":
        raise ConfigError(f"the option {name!r} must be a finite number, not {_quoted(text)}")
    if kind == "str":
        return text
    choices = re.findall(r"['\"]([^'\"]*)['\"]", kind) if kind.startswith("Literal[") else []
    if text not in choices:
        raise ConfigError(
            f"the option {name!r} must be one of {', '.join(choices)}, not {_quoted(text)}{nearest(text, choices)}"
        )
    return text


def _quoted(text: str) -> str:
    """Return the value of an option for a message, unless it may have a secret in it."""
    return repr(text) if _PLAIN.fullmatch(text) and path_shown(text) != HIDDEN else f"one that is not shown ({HIDDEN})"
