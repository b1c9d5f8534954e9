"""URLs of backends: parsing, options, hidden secrets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._url import Url, redact
from tenure.errors import ConfigError


@dataclass
class Options:
    count: int = 1
    seconds: float = 2.0
    fast: bool = False
    mode: Literal["full", "normal"] = "full"
    label: str | None = None


@pytest.mark.parametrize(
    ("written", "netloc", "path", "query"),
    [
        ("memory:", "", "", {}),
        ("memory:name", "", "name", {}),
        ("sqlite:///work.db", "", "/work.db", {}),
        ("sqlite:////var/work.db?busy=1", "", "//var/work.db", {"busy": "1"}),
        ("redis://:secret@host:6379/0?a=1&b=", "host", "/0", {"a": "1", "b": ""}),
        ("etcd://a:b@c,[::1]:1,[::2]/d?e=1", "a:b@c,[::1]:1,[::2]", "/d", {"e": "1"}),
        ("etcd://a,[::1]", "a,[::1]", "", {}),
    ],
)
def test_a_url_is_parsed(written: str, netloc: str, path: str, query: dict[str, str]) -> None:
    url = Url.parse(written)
    assert url.scheme == written.partition(":")[0]
    assert netloc in url.netloc
    assert (url.path, dict(url.query)) == (path, query)


@pytest.mark.parametrize("written", ["", "work.db", "/var/work.db", "://x", "SQLite:///x", "1st:x", "a b:c"])
def test_an_invalid_url_is_refused_with_an_example(written: str) -> None:
    with pytest.raises(ConfigError, match=r"sqlite:///work\.db or memory:"):
        Url.parse(written)


def test_a_url_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be text"):
        Url.parse(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("memory:?a=1&a=2", "is given twice"),
        ("memory:?a", "can't be read"),
        ("sqlite:///a#b.db", "%23"),
        ("redis://[::1", "can't be read"),
    ],
)
def test_a_url_with_missing_or_excess_parts_is_refused(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Url.parse(written)


def test_options_are_typed_and_others_keep_their_default() -> None:
    url = Url.parse("memory:?count=3&seconds=0.5&fast=yes&mode=normal&label=x%20y")
    assert url.options(Options) == Options(3, 0.5, True, "normal", "x y")
    assert Url.parse("memory:").options(Options) == Options()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("cuont=3", "no option 'cuont'; did you mean 'count'.*known: count, fast, label, mode, seconds"),
        ("zzz=3", r"no option 'zzz' \(known: "),
        ("count=3.5", "'count' must be a whole number, not '3.5'"),
        ("seconds=soon", "'seconds' must be a number, not 'soon'"),
        ("seconds=nan", "'seconds' must be a finite number, not 'nan'"),
        ("seconds=inf", "'seconds' must be a finite number, not 'inf'"),
        ("fast=perhaps", "'fast' must be true or false, not 'perhaps'"),
        ("mode=norml", "'mode' must be one of full, normal, not 'norml'; did you mean 'normal'"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(query: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Url.parse(f"memory:?{query}").options(Options)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("redis://me:hush@host/0", "redis://me:***@host/0"),
        ("redis://:hush@host/0", "redis://:***@host/0"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("azure://account?sas_token=hush&x=1", "azure://account?sas_token=***&x=1"),
        ("azure://account?AccountKey=hush", "azure://account?AccountKey=***"),
        ("redis://:hu/sh@host", "redis://***@host"),
        ("redis://:hu#sh@host", "redis://***@host"),
        ("redis://:hu?sh@host", "redis://***@host"),
        ("redis://:hu[sh@host", "redis://:***@host"),
        ("redis://me:hu@sh/hush@host/0?auth=hush", "redis://***@host/0?auth=***"),
        ("redis:me:hush@host", "redis:***@host"),
        ("redis:/me:hush@host", "redis:***@host"),
        ("redis:///me:hush@host", "redis://***@host"),
        ("redis://me:hu\nsh@host", "redis://me:***@host"),
        ("redis://host?pwd=hush&auth=hush&p%61ss=hush", "redis://host?pwd=***&auth=***&p%61ss=***"),
        ("redis://host?password=hu#hush", "redis://host?password=***"),
        ("redis://host?password=hu&hush", "redis://host?password=***&***"),
        ("redis://[::1?password=hush", "redis://[::1?password=***"),
        ("://me:hush@host", "***@host"),
        ("sqlite:///work.db", "sqlite:///work.db"),
        ("sqlite:////var/my@home.db?busy=1", "sqlite:////var/my@home.db?busy=1"),
        ("memory:name", "memory:name"),
    ],
)
def test_no_secret_is_shown(written: str, shown: str) -> None:
    assert redact(written) == shown
    assert "hush" not in redact(written)


def test_no_secret_is_shown_in_a_traceback_with_locals() -> None:
    url = Url.parse("redis://me:hush@host/0?password=hush")
    assert repr(url) == "Url('redis://me:***@host/0?password=***')"


@pytest.mark.parametrize(
    "written",
    [
        "redis://:hu#sh@host",
        "redis://:hu[sh@host",
        "redis://:hush@host?a&b",
        "redis://:[hush]@host",
        "redis://:hush\u2100@host",
        "redis://host?password=a&hush",
    ],
)
def test_no_secret_is_shown_by_an_error_either(written: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Url.parse(written)
    assert "hu" not in str(raised.value)
    assert raised.value.__cause__ is None


@given(st.text(max_size=30))
def test_any_text_is_a_url_or_refused_as_one(written: str) -> None:
    try:
        url = Url.parse(written)
    except ConfigError:
        return
    assert url.written == written


@given(
    st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"]), min_size=4, max_size=12), st.text(max_size=8)
)
def test_a_password_is_never_shown(password: str, rest: str) -> None:
    assert f"Q{password}Q" not in redact(f"redis://user:Q{password}Q@host/{rest}")
