"""URLs of backends: parsed once, options checked and typed, secrets never shown."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tenure.errors import ConfigError, nearest

Options = TypeVar("Options")

_SCHEME = re.compile(r"[a-z][a-z0-9+]*\Z")
_SECRET = re.compile(r"pass|pw|secret|token|key|sig|cred|auth", re.IGNORECASE)
_PARTS = re.compile(r"(?P<scheme>[^:/?#@]+:)?(?P<slashes>//)?(?P<netloc>(?(slashes)[^/?#]*))(?P<rest>.*)", re.DOTALL)
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Url:
    """A backend's address, parsed; neither ``str()`` nor ``repr()`` of it shows a password.

    ``path`` is as written (for SQLite, what follows the third slash); ``query`` holds the options, still as text.
    """

    scheme: str
    """What stands before the first colon: it chooses the backend."""
    netloc: str
    """User, password, hosts and ports, as written: it may have a secret."""
    path: str
    query: Mapping[str, str]
    written: str
    """The whole text, as it was given: it may have a secret."""

    @classmethod
    def parse(cls, written: str) -> Url:
        """Parse *written*.

        Raises:
            ConfigError: It isn't of the form ``scheme:…``, or an option is given twice.
        """
        if not isinstance(written, str):
            raise ConfigError(f"a backend's URL must be text such as 'sqlite:///work.db', not {written!r}")
        scheme, colon, _ = written.partition(":")
        if not colon or not _SCHEME.match(scheme):
            raise ConfigError(
                f"{redact(written)!r} is not the URL of a backend; write for example sqlite:///work.db or memory:"
            )
        try:
            parts = split(written)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            # Without the cause: that error may quote a part of the password.
            raise ConfigError(
                f"{redact(written)!r} can't be read as a URL; percent-encode special characters in names and "
                "passwords, and write options as ?name=value&name=value"
            ) from None
        if parts.fragment:
            raise ConfigError(f"{redact(written)!r} has a '#', which would end the address; write it as %23")
        query: dict[str, str] = {}
        for name, value in pairs:
            if name in query:
                raise ConfigError(f"the option {name!r} is given twice in {redact(written)!r}; give it once")
            query[name] = value
        return cls(parts.scheme, parts.netloc, parts.path, query, written)

    def options(self, kind: type[Options]) -> Options:
        """Build the dataclass *kind* from the query: each field an option, its annotation the type, its default kept.

        Raises:
            ConfigError: An option is unknown (the nearest known one is named), or its value doesn't fit.
        """
        fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        given: dict[str, Any] = {}
        for name, text in self.query.items():
            if name not in fields:
                known = ", ".join(sorted(fields)) or "none"
                raise ConfigError(f"{self.scheme} has no option {name!r}{nearest(name, list(fields))} (known: {known})")
            given[name] = _typed(name, text, fields[name].type)
        return kind(**given)

    def __str__(self) -> str:
        return redact(self.written)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"


def split(written: str) -> SplitResult:
    """Return the parts of a URL, which may name several hosts.

    Newer Pythons' ``urlsplit`` refuses brackets after the first host, as of an IPv6 address in ``etcd://a,[::1]``.

    Raises:
        ValueError: It is no URL.
    """
    found = _PARTS.fullmatch(written)
    assert found  # everything in it is optional
    netloc = found["netloc"]
    if "," not in netloc or "[" not in netloc:
        return urlsplit(written)
    return urlsplit(f"{found['scheme'] or ''}//{found['rest']}")._replace(netloc=netloc)


def redact(url: str) -> str:
    """Return *url* with its password and every option that may be a secret replaced by ``***``."""
    # Parsed by hand: urlsplit() drops some characters and refuses others.
    found = _PARTS.fullmatch(url)
    assert found  # everything in it is optional
    scheme, slashes, netloc, rest = (found[part] or "" for part in ("scheme", "slashes", "netloc", "rest"))
    _, at, host = url.rpartition("@")
    # A '/', '?' or '#' in a password that is not percent-encoded ends the host too early: hide all up to the last @.
    # Without a host, an @ may be part of a file's name.
    too_early = "@" in rest and (netloc or ":" in rest.rpartition("@")[0])
    if at and (too_early or not slashes):
        shown = f"{scheme}{slashes}***@{host}"
    elif "@" in netloc:
        login, _, host = netloc.rpartition("@")
        name, colon, _ = login.partition(":")
        shown = f"{scheme}//{name}:***@{host}{rest}" if colon else url
    else:
        shown = url
    address, mark, query = shown.partition("?")
    return address + mark + "&".join(map(_without_secret, query.split("&")))


def _without_secret(part: str) -> str:
    name, equals, _ = part.partition("=")
    if not equals:  # it may be the rest of a value with an & in it
        return "***" if part else ""
    return f"{name}=***" if _SECRET.search(unquote(name)) else part


def _typed(name: str, text: str, annotation: object) -> Any:
    # A class where the module has no "from __future__ import annotations", else its name.
    written = annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")
    kind = written.removesuffix(" | None")
    try:
        if kind == "bool":
            return _BOOLS[text.lower()]
        if kind == "int":
            return int(text)
        if kind == "float" and math.isfinite(float(text)):
            return float(text)
    except (KeyError, ValueError) as error:
        expected = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise ConfigError(f"the option {name!r} must be {expected}, not {text!r}") from error
    if kind == "float":
        raise ConfigError(f"the option {name!r} must be a finite number, not {text!r}")
    if kind == "str":
        return text
    choices = re.findall(r"['\"]([^'\"]*)['\"]", kind) if kind.startswith("Literal[") else []
    if text not in choices:
        raise ConfigError(
            f"the option {name!r} must be one of {', '.join(choices)}, not {text!r}{nearest(text, choices)}"
        )
    return text
