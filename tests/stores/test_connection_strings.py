"""Connection strings as services print them: each is accepted, or refused with what to write instead."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")

from urllib.parse import quote

from tenure._backends import postgres, rabbitmq, redis
from tenure._backends.redis.sentinel import SentinelOptions
from tenure._registry import BACKENDS, load
from tenure._secret import Secret
from tenure._set_aside import facts_set_aside
from tenure._url import Url
from tenure.errors import ConfigError

STRINGS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "connection_strings.toml").read_text(encoding="utf-8")
)["string"]
ACCEPTED = [one for one in STRINGS if "instead" not in one]
REFUSED = [one for one in STRINGS if "instead" in one]
MADE_UP = re.compile(r"s3cretPw|AbC123dEf|AbCdEf0123456789|p4b5c6d7e8f9|AXlyAAIjcDE1s3cret|p%2Fw|p/w")
"""What stands in the passwords."""


def of(one: dict[str, Any]) -> str:
    return str(one["of"])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that are named, and a home without those of libpq."""
    (tmp_path / "global-bundle.pem").write_text("certificates")
    (tmp_path / "ngs.creds").write_text("made up")
    (tmp_path / "ngs.creds").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PGHOST", "PGSSLMODE", "PGSSLROOTCERT", "PGCHANNELBINDING"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("one", ACCEPTED, ids=of)
def test_what_services_print_is_accepted(one: dict[str, Any]) -> None:
    url = Url.parse(one["text"])
    backend = load(url).open(url)
    told = url.password or url.query.get("password")
    if "password" in one:
        assert told == Secret(one["password"])
    assert not MADE_UP.search(f"{url}{url!r}{getattr(backend, 'warnings', '')}")
    options: dict[str, type[Any]] = {"postgres": postgres.Options, "postgresql": postgres.Options}
    options |= {"amqp": rabbitmq.Options, "amqps": rabbitmq.Options}
    options |= {scheme: redis.Options for scheme, (module, _) in BACKENDS.items() if module.endswith(".redis")}
    options |= {"redis+sentinel": SentinelOptions, "rediss+sentinel": SentinelOptions}
    facts = facts_set_aside(url.options(options[url.scheme])) if url.scheme in options else []
    assert sorted(fact.name for fact in facts) == sorted(f"option {name}" for name in one.get("aside", ()))
    assert all(fact.value.startswith("set aside: ") and not fact.advice for fact in facts)


@pytest.mark.parametrize("one", REFUSED, ids=of)
def test_the_others_are_refused_with_what_to_write_instead(one: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=one["instead"]) as raised:
        url = Url.parse(one["text"])
        load(url).open(url)
    assert not MADE_UP.search(str(raised.value))


def test_both_kinds_are_there_and_no_name_twice() -> None:
    assert len(ACCEPTED) > 40 < len(REFUSED)
    assert len({of(one) for one in STRINGS}) == len(STRINGS)


# --- a password with any character -------------------------------------------------------------------------------

LOGINS = {
    "amqp": "amqp://u:{}@h/",
    "etcd": "etcd://u:{}@h",
    "nats": "nats://u:{}@h",
    "postgresql": "postgresql://u:{}@h/d",
    "redis": "redis://u:{}@h/0",
    "redis+sentinel": "redis+sentinel://u:{}@h/mymaster",
    "redis+unix": "redis+unix://u:{}@/run/redis.sock",
    "zookeeper": "zookeeper://u:{}@h/",
}
"""A URL with a login, of each kind."""
OPTIONS = {"postgresql": "postgresql://u@h/d?password={}", "redis": "redis://h/0?password={}"}
"""Those with a password among their options."""
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
PASTED = "qQ7{}Z9w"
"""A password that is found in a message if it is shown."""


@pytest.mark.parametrize(
    "form", [*LOGINS.values(), *OPTIONS.values()], ids=[*LOGINS, *(f"{one}, option" for one in OPTIONS)]
)
@given(TEXTS)
@example("/?#[]@!$&'()*+,;=:%\\ \"<>^`{|}~")
@example("***")
@example("[your-password]")
@example("\n\t\0\x7f")
def test_any_password_is_told_if_it_is_percent_encoded(form: str, password: str) -> None:
    url = Url.parse(form.format(quote(PASTED.format(password), safe="")))
    assert (url.password or url.query.get("password")) == Secret(PASTED.format(password))
    assert PASTED.format(password) not in f"{url}{url!r}"


@pytest.mark.parametrize(
    "form", [*LOGINS.values(), *OPTIONS.values()], ids=[*LOGINS, *(f"{one}, option" for one in OPTIONS)]
)
@given(TEXTS)
@example("@")
@example("#")
@example("/")
@example("?")
@example("[")
@example("+")
@example("&")
@example("&a=")
@example("@a/")
@example(",redis://")
@example(":1/?a=@")
@example(" ")
def test_one_that_is_not_is_told_as_it_is_or_refused(form: str, pasted: str) -> None:
    if re.search("%[0-9A-Fa-f]{2}", pasted):
        return  # nothing tells it from one that is encoded
    password = PASTED.format(pasted)
    try:
        url = Url.parse(form.format(password))
        load(url).open(url)
    except ConfigError as error:
        shown = str(error)
        assert re.search("percent-encode|write|must|known|unknown|placeholder|given twice|correct", shown)
    else:
        shown = f"{url}{url!r}"
        assert (url.password or url.query.get("password")) == Secret(password)
    assert "qQ7" not in shown
    assert "Z9w" not in shown
