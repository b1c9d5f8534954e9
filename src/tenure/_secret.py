"""A text that is never shown: a password, a token, a key."""

from __future__ import annotations

import re
from typing import Any, NoReturn
from weakref import WeakValueDictionary

HIDDEN = "***"

_KEY = re.compile(r"[A-Za-z0-9+/_=-]{20,}\Z")
"""How keys, tokens and seeds look; names of files have a dot, or begin with a slash, or are shorter."""


class Secret:
    """A text that no message, log, traceback or copy shows; ``reveal()`` is the one way to it.

    Example:
        >>> password = Secret("hush")
        >>> f"{password}", repr(password), password.reveal()
        ('***', "Secret('***')", 'hush')
    """

    __slots__ = ("__weakref__", "_text")

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text, for the driver that needs it."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __str__(self) -> str:
        return HIDDEN

    def __repr__(self) -> str:
        return f"Secret({HIDDEN!r})"

    def __format__(self, how: str) -> str:
        return format(HIDDEN, how)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled: what is written may be read by others")


def path_shown(path: str) -> str:
    """Return a path for a message; ``***`` if it may be the secret itself, in place of the file that holds it."""
    return HIDDEN if _KEY.match(path) and not path.startswith("/") else path


def revealed(secret: Secret | None) -> str | None:
    """Return the text of a secret for a driver, which sends it to a server; None if there is none.

    From then on, what a server says is shown without it.
    """
    if secret is None:
        return None
    hide(secret)
    return secret.reveal()


def hide(*secrets: Secret | None) -> None:
    """Note that servers get to know these secrets: what they say is shown without them, as long as these values live.

    For secrets that a driver gets in another way than by ``revealed``, such as in a longer text.
    """
    for secret in secrets:
        if secret:
            _SENT[id(secret)] = secret


def sent() -> list[Secret]:
    """Return the secrets that servers may know, and quote."""
    return [secret for ref in _SENT.valuerefs() if (secret := ref()) is not None]


_SENT: WeakValueDictionary[int, Secret] = WeakValueDictionary()
"""By identity: of two that are equal, one may end before the other."""
