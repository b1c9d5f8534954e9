"""What a server says, without the secrets that it quotes.

A server, or a gateway before it, may quote the request in its refusal: with the login that was in it. So a store shows
texts of servers and of errors of its driver by ``redacted`` only, and translates these errors under ``redacting``. Our
own words, and the addresses in them, are left alone: a weak password such as ``guest`` may stand in them.

A secret is found in whatever way its characters are escaped: as in JSON (also of Go, and of JSON in JSON), URLs, HTML,
literals of Python, UTF-8 that was read as Latin-1; and in base64, with whatever is written beside it, such as a user.
Its beginning is found, too, where a text was cut off.
"""

from __future__ import annotations

import base64
import re
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

from tenure._secret import HIDDEN, sent
from tenure.errors import TenureError

P = ParamSpec("P")
R = TypeVar("R")

TEXT_MAX = 2**14
"""The most characters of a text that are shown."""
LOOKED_AT = 2 * TEXT_MAX
"""The most characters that are looked at: what begins among the first ones ends among these."""
ATTEMPTS_MAX = 1_000
"""So many beginnings that go on otherwise are looked at in a text: one with more of them is hidden from there on."""
BEGINNING = 8
"""So many characters of a secret are recognised without the others, where the text ends."""
_CUT_OFF = re.compile(r"(?:[\\%&][\w#\\%]{0,10})?(?:\.\.\.|…|\Z)")
"""What follows a beginning there: perhaps a part of an escape. Elsewhere it may be a word of the server's own."""
_WORD_MAX = 3
"""Secrets up to this length are found as words only: as a part of words, they would tell more than they hide."""
_CODED_MIN = 4
"""Characters of base64 that must agree at least."""
_ALPHABET = frozenset(string.ascii_letters + string.digits + "+/-_=%")
"""Of base64, also percent-encoded: what stands beside a secret there belongs to it, too."""
_NAMED = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}
_FLAGS = re.IGNORECASE  # some drivers write what a server says in small letters
_SHORT = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f", "\0": "0"}


def redacted(text: str) -> str:
    """Return what a server says, or an error of a driver, with ``***`` for each secret that was sent to a server."""
    secrets = sent()
    if not secrets or not text:
        return text[:TEXT_MAX]
    looked_at = text[:LOOKED_AT]
    spans = sorted(span for secret in secrets for span in _spans(secret.reveal(), looked_at))
    shown, at = list[str](), 0
    for begin, end in spans:
        if begin < TEXT_MAX and end > at:
            shown += [looked_at[at:begin], HIDDEN] if begin > at or not shown else []
            at = end
    return "".join([*shown, looked_at[at:TEXT_MAX]])


def redact(error: BaseException) -> None:
    """Replace the secrets in the texts of an error of a driver, and of those that it was made of, in place.

    Its traceback shows them otherwise. Call it when its text has been judged.
    """
    if not sent():
        return
    with suppress(Exception):  # the translated error counts, whatever an error of a driver is like
        for one in _made_of(error):
            if not isinstance(one, TenureError):
                with suppress(Exception):
                    _redact_alone(one)


def _redact_alone(error: BaseException) -> None:
    given = {"args": error.args, **vars(error), "strerror": getattr(error, "strerror", None)}
    for name, value in given.items():
        if (shown := _redacted_value(value)) != value:
            with suppress(AttributeError, TypeError):
                setattr(error, name, shown)
    # The text of a response, which some of Azure's errors read when they are shown.
    if hasattr(error, "response") and redacted(text := str(error)) != text[:TEXT_MAX]:
        error.response = None


def redacting(translate: Callable[P, R]) -> Callable[P, R]:
    """Make a function that translates an error of a driver, one of its arguments, redact it when it has judged it."""

    @wraps(translate)
    def translated(*args: P.args, **named: P.kwargs) -> R:
        found = translate(*args, **named)
        for one in (*args, *named.values()):
            if isinstance(one, BaseException):
                redact(one)
        return found

    return translated


def _made_of(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = getattr(one, "exceptions", ())
        more = [one.__cause__, one.__context__, *one.args, *vars(one).values()]
        more += inner if isinstance(inner, (list, tuple)) else []
        waiting += [each for each in more if isinstance(each, BaseException)]


def _redacted_value(value: Any) -> Any:
    match value:
        case str():
            shown = redacted(value)
            return (
                value if shown == value[:TEXT_MAX] else shown
            )  # a long text of somebody else is cut for no other reason
        case bytes():
            return _redacted_value(value.decode("latin-1")).encode("latin-1")
        case tuple() if type(value) is tuple:
            return tuple(map(_redacted_value, value))
        case list():
            return list(map(_redacted_value, value))
    return value


# --- where a secret stands ---------------------------------------------------------------------------------------


def _spans(secret: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield where *secret*, or its beginning, stands in *text*."""
    yield from _places(secret, text)
    for coded in _coded(secret):
        done = 0
        for begin, end in _places(coded, text):
            if end <= done:  # it is a part of what was found
                continue
            while begin > done and text[begin - 1] in _ALPHABET:
                begin -= 1
            while end < len(text) and text[end] in _ALPHABET:
                end += 1
            yield begin, end
            done = end


def _places(written: str, text: str) -> Iterator[tuple[int, int]]:
    pattern = "".join(f"(?:{'|'.join(_ways(one))})" for one in written[:BEGINNING])
    if len(written) <= _WORD_MAX:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    at, beginning, left = 0, re.compile(pattern, _FLAGS), ATTEMPTS_MAX
    while found := beginning.search(text, at):
        end, is_whole = _end(written, text, found.start())
        if is_whole or _CUT_OFF.match(text, end):
            yield found.start(), end
            at = end
        elif left := left - 1:
            at = found.start() + 1  # it may begin within what looked like it
        else:
            yield found.start(), len(text)
            return


def _end(written: str, text: str, begin: int) -> tuple[int, bool]:
    """Return where *written*, which begins at *begin*, ends in *text*, or differs from it; and whether it is whole."""
    ends = {begin}
    for one in written:
        # Several, as what is escaped may begin with the character itself: % is %25, too.
        more = {
            found.end() for way in _ways(one) for end in ends if (found := re.compile(way, _FLAGS).match(text, end))
        }
        if not more:
            return max(ends), False
        ends = more
    return max(ends), True


@lru_cache
def _ways(one: str) -> tuple[str, ...]:
    """Return patterns for all ways to write a character."""
    if one.isascii() and one.isalnum():
        return (one,)
    utf8, code = one.encode("utf-8", "surrogatepass"), ord(one)
    units = one.encode("utf-16-be", "surrogatepass").hex()
    slashes = r"\\{1,8}"  # JSON in JSON doubles them
    ways = {
        *([rf"\\{{{count}}}" for count in (8, 4, 2, 1)] if one == "\\" else [rf"\\{{0,8}}{re.escape(one)}"]),
        "".join(rf"{slashes}u{units[at : at + 4]}" for at in range(0, len(units), 4)),
        rf"{slashes}U{code:08x}",
        "".join(rf"{slashes}x{byte:02x}" for byte in utf8),
        "".join(rf"%(?:25){{0,3}}{byte:02x}" for byte in utf8),
        re.escape(utf8.decode("latin-1")),
        rf"&(?:amp;)?#(?:0{{0,6}}{code}|x0{{0,6}}{code:x});",
    }
    if code < 256:
        ways.add(rf"{slashes}x{code:02x}")
    if one in _NAMED:
        ways.add(rf"&(?:amp;)?{_NAMED[one]};")
    if one in _SHORT:
        ways.add(rf"{slashes}{_SHORT[one]}")
    if one == " ":
        ways.add(r"\+")
    return tuple(sorted(ways))


def _coded(secret: str) -> Iterator[str]:
    """Yield the part of a secret's base64 that is the same whatever stands before and after it."""
    raw = secret.encode("utf-8", "surrogatepass")
    for before in range(3):
        coded = base64.b64encode(bytes(before) + raw).decode()
        inside = coded[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]
        if len(inside) >= _CODED_MIN:
            yield inside
            if "+" in inside or "/" in inside:
                yield inside.replace("+", "-").replace("/", "_")
