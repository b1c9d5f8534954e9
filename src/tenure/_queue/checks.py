"""Checks of the names, texts and counts of queues and messages: every store can keep what passes them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tenure._checks import check_seconds
from tenure._foreign import Unreadable, a_text
from tenure.errors import ConfigError

NAME_MAX = 200
TEXT_MAX = 255
INT_MAX = 2**63 - 1
COUNT_MAX = 2**31 - 1

DEAD_SUFFIX = "$dead"
"""Dead letters are a queue of their own, under the queue's name with this behind it."""


def check_name(name: object, what: str = "the queue's name", *, optional: bool = False) -> str:
    """Return *name* if a queue can be called so.

    Raises:
        ConfigError: It is empty, too long, or holds a character that is kept for tenure's own use.
    """
    check_text(what, name, most=NAME_MAX, optional=optional)
    assert isinstance(name, str)
    if name.endswith(DEAD_SUFFIX):
        home = name.removesuffix(DEAD_SUFFIX)
        raise ConfigError(
            f"{what} ({name!r}) must not contain '$'; the dead letters of {home!r} are "
            f"queue({home!r}).dead_letters, and tenure dead on the command line"
        )
    if "$" in name:
        raise ConfigError(f"{what} ({name!r}) must not contain '$', which marks tenure's own queues")
    if not name.isprintable() or name != name.strip():
        raise ConfigError(f"{what} ({name!r}) must be printable, with no space around it")
    return name


def read_name(value: object) -> str:
    """Return the name of a queue that another program may have written.

    Raises:
        Unreadable: No queue can be called so.
    """
    try:
        return check_name(value)
    except ConfigError as error:
        raise Unreadable(str(error)) from None


def read_id(value: object) -> str:
    """Return the id of a message, or a correlation id, that another program may have written.

    Raises:
        Unreadable: No sender can have set it.
    """
    if text := a_text(value, TEXT_MAX):
        return text
    raise Unreadable("it is an empty text")


def check_text(what: str, text: object, most: int = TEXT_MAX, *, optional: bool = False) -> None:
    """Refuse *text* that is no text, empty, longer than *most*, or that can't be stored."""
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be text, not {text!r:.80}")
    if not text:
        instead = "leave it out instead" if optional else "give it at least one character"
        raise ConfigError(f"{what} must not be empty; {instead}")
    if len(text) > most:
        raise ConfigError(f"{what} ({len(text)} characters) must not be longer than {most} characters")
    check_encodable(what, text)


def check_count(what: str, count: object, least: int = 1, most: int = COUNT_MAX) -> None:
    """Refuse a *count* that is no whole number, less than *least*, or more than every store can count."""
    if type(count) is not int or count < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, not {count!r:.80}")
    if count > most:
        raise ConfigError(f"{what} must not be more than {most:,}")


def check_rate(name: str, rate: object) -> None:
    """Refuse what is no rate.

    Raises:
        ConfigError: The message shows the value and one that fits.
    """
    if isinstance(rate, float) and rate == math.inf:
        return
    if not isinstance(rate, tuple) or len(rate) != 2:
        raise ConfigError(
            f"{name} must be (count, seconds), such as (100, 60), or math.inf for no limit, not {rate!r:.80}"
        )
    check_count(f"the count of {name}", rate[0])
    check_seconds(f"the time of {name}", rate[1], least=0.001)


def check_most(name: str, most: object) -> None:
    """Refuse what is no number of messages, and not infinite.

    Raises:
        ConfigError: The message shows the value.
    """
    if most != math.inf:
        check_count(name, most, most=COUNT_MAX)


def check_sequences(what: str, sequences: Iterable[object]) -> None:
    """Refuse what can't be the sequence of a message."""
    for one in sequences:
        check_count(what, one, least=0, most=INT_MAX)


def check_collection(what: str, given: object) -> None:
    """Refuse a text, which is a collection of letters, where a collection of texts or numbers is meant."""
    if isinstance(given, (str, bytes)):
        raise ConfigError(f"{what} must be a collection, not {given!r}; try {what}=[{given!r}]")


def check_encodable(what: str, text: str) -> None:
    if text.isascii():
        if "\0" in text:
            raise ConfigError(f"{what} must not contain a NUL character")
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} ({text!r:.80}) can't be encoded as UTF-8") from error
    if "\0" in text:
        raise ConfigError(f"{what} must not contain a NUL character")
