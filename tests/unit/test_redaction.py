"""What a server says is shown without the secrets that it quotes, however it writes them."""

from __future__ import annotations

import base64
import gc
import html
import json
import re
import time
import traceback
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from tenure import Secret
from tenure._redaction import LOOKED_AT, TEXT_MAX, redact, redacted, redacting
from tenure._secret import HIDDEN, hide, revealed, sent

HARD = "hUsH@:/?#[]&=%+ é\U0001f511'\"<>\n\0\\\\hUsH"

WAYS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "JSON": json.dumps,
    "JSON in JSON": lambda text: json.dumps(json.dumps(text)),
    "JSON in JSON in JSON": lambda text: json.dumps(json.dumps(json.dumps(text))),
    "JSON of Go": lambda text: json.dumps(text).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    "JSON without escapes": lambda text: json.dumps(text, ensure_ascii=False),
    "a path": quote,
    "an option": lambda text: quote(text, safe=""),
    "a form": quote_plus,
    "an option in an option": lambda text: quote(quote(text, safe=""), safe=""),
    "Python": repr,
    "Python in ASCII": ascii,
    "bytes in Python": lambda text: repr(text.encode()),
    "HTML": html.escape,
    "Latin-1": lambda text: text.encode().decode("latin-1"),
    "small letters": str.lower,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 after a": lambda text: base64.b64encode(f"a:{text}".encode()).decode(),
    "base64 after ann": lambda text: base64.b64encode(f"ann:{text}".encode()).decode(),
    "base64 of URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_secret_is_found_however_it_is_written(way: str) -> None:
    secret = Secret(HARD)
    revealed(secret)
    written = WAYS[way](HARD)
    shown = redacted(f"before <{written}> between <{written}> after")
    assert "hush" not in shown.lower()
    assert re.fullmatch(r"before <(\S*\*\*\*\S*)> between <\1> after", shown)


@pytest.mark.parametrize(
    "cut", [HARD[:8], HARD[:12], quote(HARD, safe="")[:29], base64.b64encode(HARD.encode()).decode()[:12]]
)
@pytest.mark.parametrize("end", ["", "...", "…"])
def test_the_beginning_of_a_secret_is_found_where_a_text_was_cut_off(cut: str, end: str) -> None:
    secret = Secret(HARD)
    revealed(secret)
    shown = redacted(f"before {cut}{end}")
    assert "hush" not in shown.lower()
    assert shown.startswith("before ***")
    assert HIDDEN not in redacted(f"not {HARD[:12]} there")


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        ("abcabcabcabd", "x abcabcabcabcabd y"),
        ("0000000000000001", "00000000000000001"),
        ("a" * 12 + "b", "a" * 40 + "b"),
    ],
)
def test_a_secret_is_found_that_begins_within_what_looked_like_it(secret: str, text: str) -> None:
    hidden = Secret(secret)
    hide(hidden)
    assert secret not in redacted(text)
    assert HIDDEN in redacted(text)


class Odd(Exception):
    """One of a driver that can't be shown, or changed."""

    exceptions = None

    def __init__(self) -> None:
        super().__init__()
        self.itself: list[object] = []
        self.itself.append(self.itself)

    @property
    def response(self) -> str:
        return "text"

    def __str__(self) -> str:
        raise RuntimeError("it has no text")


def test_an_odd_error_is_left_as_it_is() -> None:
    secret = Secret("hUsHsecrethUsH")
    hide(secret)

    @redacting
    def translate(error: Exception) -> str:
        return "translated"

    odd = Odd()
    odd.__cause__ = DriverError(secret.reveal())
    assert translate(odd) == "translated"
    assert odd.__cause__.args == ("***",)


def test_a_word_with_which_a_secret_begins_is_shown() -> None:
    secret = Secret("consumer-password")
    hide(secret)
    said = 'permissions violation for publish to "$JS.API.CONSUMER.NAMES.orders" by consumer'
    assert redacted(f"{said}-1") == f"{said}-1"


def test_only_what_was_sent_is_hidden_and_only_as_long_as_it_is_in_use() -> None:
    kept, unsent = Secret("a secret"), Secret("another one")
    hide(kept, None, Secret(""))
    equal = Secret("a secret")
    hide(equal)
    del equal
    gc.collect()
    assert redacted(f"{kept.reveal()}, {unsent.reveal()}") == "***, another one"
    del kept
    gc.collect()
    assert redacted("a secret") == "a secret"
    assert not [one for one in sent() if one == unsent]


@pytest.mark.parametrize("short", ["x", "ab1"])
def test_a_short_secret_is_hidden_as_a_word_only(short: str) -> None:
    secret = Secret(short)
    hide(secret)
    assert redacted(f"user:{short}@host, s{short}") == f"user:***@host, s{short}"


def test_a_text_without_end_is_cut_without_a_half_secret() -> None:
    secret = Secret("A1b2" * 500)
    hide(secret)
    text = ("." * (TEXT_MAX - 10)) + secret.reveal() * 100
    assert redacted(text) == "." * (TEXT_MAX - 10) + "***"
    assert len(redacted("." * 10**6)) == TEXT_MAX < LOOKED_AT


@pytest.mark.parametrize(
    ("secret", "text"),
    [("a" * 12 + "b", "a"), ("%" * 20, "%25"), ("\\\\" * 6, "\\\\"), ("test", "dGVzd"), ("hunter2", "aHVudGVyMg")],
)
def test_hostile_texts_take_no_time(secret: str, text: str) -> None:
    hidden = Secret(secret)
    hide(hidden)
    began = time.process_time()
    redacted(text * 10**6)
    assert time.process_time() - began < 5.0


class DriverError(Exception):
    detail = ""


def test_the_errors_of_a_driver_are_redacted_in_place() -> None:
    secret = Secret("hUsHsecrethUsH")
    hide(secret)
    text = secret.reveal()
    cause = DriverError(f"the cause has {text}", text.encode(), 7)
    error = DriverError(f"no {text}")
    error.detail, error.__cause__ = f"DETAIL: {text}", cause
    error.add_note(f"a note with {text}")
    redact(error)
    assert error.detail == "DETAIL: ***"
    assert cause.args == ("the cause has ***", b"***", 7)
    assert "hUsH" not in "".join(traceback.format_exception(error))


def test_an_error_without_a_secret_stays_as_it_is() -> None:
    """Also one of the user's, which was handled when a store failed."""
    secret = Secret("hUsHsecrethUsH")
    hide(secret)
    handled = ValueError("x" * 10**5, b"y" * 10**5)
    error = DriverError("no answer")
    error.__context__ = handled
    redact(error)
    assert handled.args == ("x" * 10**5, b"y" * 10**5)


def test_an_error_is_judged_before_it_is_redacted() -> None:
    secret = Secret("NOPERM")  # a password that is also a word of the server
    hide(secret)

    @redacting
    def translate(error: Exception) -> str:
        return f"{str(error).startswith('NOPERM')} {redacted(str(error))}"

    error = DriverError("NOPERM for you")
    assert translate(error) == "True *** for you"
    assert str(error) == "*** for you"
