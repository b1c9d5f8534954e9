"""URLs of backends: parsing, options, hidden secrets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._registry import load
from tenure._secret import Secret, revealed
from tenure._url import Url, in_url, secret_in, shown_in
from tenure.errors import ConfigError


@dataclass
class Options:
    count: int = 1
    seconds: float = 2.0
    fast: bool = False
    mode: Literal["full", "normal"] = "full"
    label: str | None = None


@pytest.mark.parametrize(
    ("written", "user", "password", "hosts", "path", "query"),
    [
        ("memory:", None, None, "", "", {}),
        ("memory:name", None, None, "", "name", {}),
        ("sqlite:///work.db", None, None, "", "/work.db", {}),
        ("sqlite:////var/work.db?busy=1", None, None, "", "//var/work.db", {"busy": "1"}),
        ("redis://:secret@host:6379/0?a=1&b=", "", "secret", "host:6379", "/0", {"a": "1", "b": ""}),
        ("nats://t%40k%3Aen@host", "t@k:en", None, "host", "", {}),
        ("redis://:@host", "", "", "host", "", {}),
        ("etcd://a:b@c,[::1]:1,[::2]/d?e=1", "a", "b", "c,[::1]:1,[::2]", "/d", {"e": "1"}),
        ("etcd://a,[::1]", None, None, "a,[::1]", "", {}),
        ("postgresql://?password=p@ss", None, None, "", "", {"password": "p@ss"}),
    ],
)
def test_a_url_is_parsed(
    written: str, user: str | None, password: str | None, hosts: str, path: str, query: dict[str, str]
) -> None:
    url = Url.parse(written)
    assert url.scheme == written.partition(":")[0]
    assert (revealed(url.user), revealed(url.password)) == (user, password)
    assert (url.hosts, url.path) == (hosts, path)
    assert {name: value.reveal() for name, value in url.query.items()} == query


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


# --- secrets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("redis://me:hush@host/0", "redis://me:***@host/0"),
        ("redis://:hush@host/0", "redis://:***@host/0"),
        ("redis://hush@host/0", "redis://***@host/0"),
        ("redis://hush:@host/0", "redis://***@host/0"),
        ("nats://hush@a:1,[::1]:2", "nats://***@a:1,[::1]:2"),
        ("nats://a:b@hush@host", "nats://***@host"),
        ("azure://me:hush@account", "azure://***@account"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://me@/db?host=/var/run", "postgresql://me@/db?host=/var/run"),
        ("postgresql://host/db?user=me&password=p@hush", "postgresql://host/db?user=me&password=***"),
        ("azure://account?sas_token=hush&timeout=1", "azure://account?sas_token=***&timeout=1"),
        ("azure://account?key_env=MY_KEY", "azure://account?key_env=MY_KEY"),
        ("azure://account?key_env=hush", "azure://account?key_env=***"),
        ("me:hu@hush", "me:***"),
        ("redis://host?pwd=hush&auth=digest&p%61ss=hush", "redis://host?pwd=***&auth=digest&***"),
        ("redis://host?password=a&hush=b&timeout=1", "redis://host?password=***&***&timeout=1"),
        ("kubernetes://ns?server=https://me:hush@host", "kubernetes://ns?server=***"),
        ("kubernetes://ns?server=https://me:hush%40host", "kubernetes://ns?server=***"),
        ("redis://:hush", "redis:***"),
        ("redis://me:hush/0", "redis:***"),
        ("peers://a:7000,b:hush", "peers:***"),
        ("memory:me@home", "memory:me@home"),
        ("redis:me:hush@host", "redis:***"),
        ("redis:/me:hush@host", "redis:***"),
        ("redis:///me:hush@host", "redis:***"),
        ("sqlite:me:hush@host", "sqlite:***"),
        ("sqlite:///work.db", "sqlite:///work.db"),
        ("sqlite:////var/my@home.db?busy=1", "sqlite:////var/my@home.db?busy=1"),
        ("memory:name", "memory:name"),
        (
            "postgresql://h/d?application_name=my%20order-service-of-eu-1",
            "postgresql://h/d?application_name=my%20order-service-of-eu-1",
        ),
        (
            "kubernetes://ns?context=kubernetes-admin%40kubernetes",
            "kubernetes://ns?context=kubernetes-admin%40kubernetes",
        ),
        ("rediss://h?ca=/etc/ssl/certs/of-a-long-name", "rediss://h?ca=/etc/ssl/certs/of-a-long-name"),
        ("rediss://h?ca=0123456789abcdef0123456789abcdef", "rediss://h?ca=***"),
        ("postgresql:///d?host=h port=1 password=hush", "postgresql:///d?host=***"),
        ("sqlite:///C:/Users/ann@home/work.db", "sqlite:///C:/Users/ann@home/work.db"),
        ("redis://ann@h?password_file=/run/db", "redis://ann@h?password_file=/run/db"),
        ("redis://ann@h?password_command=echo%20hush", "redis://ann@h?password_command=***"),
        ("nats://ann@h?password_file=eyJhb.eyJzdW.s1gn", "nats://ann@h?password_file=***"),
        ("nats://token@h?timeout=1", "nats://***@h?timeout=1"),
    ],
)
def test_no_secret_is_shown(written: str, shown: str) -> None:
    url = Url.parse(written)
    assert str(url) == url.shown == shown
    assert repr(url) == f"Url({shown!r})"
    assert "hush" not in shown
    assert (shown == written) == ("***" not in shown)


@pytest.mark.parametrize(
    "written",
    [
        "hush",
        "://me:hush@host",
        "AccountName=a;AccountKey=hush",
        "redis://:hush/hush@host",
        "redis://:hu?hush@host",
        "redis://me:hu@sh/hush@host/0?auth=hush",
        "redis://me:hush\nhush@host",
        "redis://:hu#hush@host",
        "redis://:hu[hush@host",
        "redis://:hush@host?a&b",
        "redis://[::1?password=hush",
        "redis://:[hush]@host",
        "redis://:hush\u2100@host",
        "redis://host?password=a&hush",
        "redis://host?password=hu+sh",
        "redis://:12?name=hush@host",
        "redis://:***@hush,redis://:hush@b",
        "redis://:hush@a,redis://b",
        "redis-cli -u redis://:hush@host",
        "URL=redis://:hush@host",
        "'redis://:hush@host'",
        "jdbc:postgresql://host/d?password=hush",
        "host=a password=hush",
        "Server=a;Password=hush;",
        "Endpoint=sb://a;SharedAccessKey=hush",
        "a:6380,password=hush,ssl=True",
        "hush:6379",
        " redis://:hush@host",
        "redis://host?hush=a&hush=b",
        "redis://host?password=hu#hush",
    ],
)
def test_what_can_not_be_parsed_is_not_shown(written: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Url.parse(written)
    assert "hu" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "mask", ["***", "********", "[YOUR-PASSWORD]", "<password>", "{your_password}", "<show-password>"]
)
@pytest.mark.parametrize("form", ["postgresql://me:{}@host/d", "redis://:{}@host", "mongodb://me:{}@host/?a=b"])
def test_a_password_that_a_page_has_not_shown_is_asked_for(form: str, mask: str) -> None:
    with pytest.raises(ConfigError, match="a placeholder, or a mask, where the password is; write the password there"):
        Url.parse(form.format(mask))
    assert Url.parse(form.format(quote(mask, safe=""))).password == Secret(mask)  # if it really is one


def test_what_is_no_text_is_not_shown_either() -> None:
    with pytest.raises(ConfigError, match="not bytes"):
        Url.parse(b"redis://:hush@host")  # type: ignore[arg-type]


def test_the_name_of_an_option_that_may_be_a_part_of_a_secret_is_not_shown() -> None:
    for written in ("memory:?password=hu&hush=1", "memory:?hu.hush=1"):
        with pytest.raises(ConfigError, match=r"has an option that memory doesn't know.*%26") as raised:
            Url.parse(written).options(Options)
        assert "hush" not in str(raised.value)


def test_a_url_in_another_text_is_shown_without_its_secret() -> None:
    assert shown_in("--on=redis://:hush@host") == "--on=redis://:***@host"
    assert shown_in("x redis://:hu/hush@host") == "x redis:***"
    assert shown_in("servicebus:?sig=hush") == "servicebus:?sig=***"
    assert shown_in("orders: all") == "orders: all"


def test_a_secret_is_read_from_the_environment() -> None:
    assert secret_in({"A": " hush\n"}, "key_env", "A") == Secret("hush")
    with pytest.raises(ConfigError, match="variable MY_KEY is not set; key_env says"):
        secret_in({}, "key_env", "MY_KEY")
    with pytest.raises(ConfigError, match="key_env must name an environment variable") as raised:
        secret_in({}, "key_env", "hush+/=")
    assert "hush" not in str(raised.value)


# --- hosts -------------------------------------------------------------------------------------------------------


def test_hosts_are_read() -> None:
    url = Url.parse("etcd://me:x@a,b:7,[::1]:8,a:9,[::2],a")
    assert url.places(9, "form") == (("a", 9), ("b", 7), ("::1", 8), ("::2", 9))
    assert [in_url(host, port) for host, port in url.places(9, "form")][2:] == ["[::1]:8", "[::2]:9"]
    assert Url.parse("redis://h").place(9, "form") == ("h", 9)


@pytest.mark.parametrize("hosts", ["", "a,", "a:0", "a:65536", "a:x", "a:\u0661", "a:b:1", "[::1", "::1", "a]", "a,:1"])
def test_hosts_that_are_none_are_refused_with_the_right_form(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"write x|can't be read"):
        Url.parse(f"etcd://me:hush@{hosts}").places(9, "write x")


def test_one_host_is_one() -> None:
    with pytest.raises(ConfigError, match="names several hosts, and redis: has one; write x"):
        Url.parse("redis://a,b").place(9, "write x")


def test_an_option_is_added() -> None:
    url = Url.parse("sqlite:///work.db?busy=1")
    more = url.with_option("create", "false")
    assert more.query == {"busy": Secret("1"), "create": Secret("false")}
    assert (str(more), more.written) == (str(url), url.written)


@given(st.text(max_size=30))
def test_any_text_is_a_url_or_refused_as_one(written: str) -> None:
    try:
        url = Url.parse(written)
    except ConfigError:
        return
    assert url.written == Secret(written)


@given(
    st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"]), min_size=4, max_size=12), st.text(max_size=8)
)
def test_a_password_is_never_shown(password: str, rest: str) -> None:
    try:
        shown = str(Url.parse(f"redis://user:Q{password}Q@host/{rest}"))
    except ConfigError as error:
        shown = str(error)
    assert f"Q{password}Q" not in shown


@pytest.mark.parametrize("option", ["password_file", "password_command"])
@pytest.mark.parametrize("written", ["sqlite:///work.db", "memory:", "kubernetes://default"])
def test_a_store_without_passwords_says_so(written: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"has no passwords, so {option}= is of no use; leave it out"):
        load(url := Url.parse(f"{written}?{option}=/f")).open(url)
