"""What others write in place of a URL; the strings of services are in ``tests/stores/connection_strings.toml``."""

from __future__ import annotations

import pytest

from tenure._pasted import _KINDS, _MORE, _NONE, LOOKED_AT, refusal_of_form, refusal_of_scheme
from tenure._registry import BACKENDS
from tenure._url import Url


def test_what_was_meant_is_a_scheme_and_no_scheme_is_another_one() -> None:
    assert set(_KINDS.values()) <= BACKENDS.keys()
    assert not (_KINDS.keys() | _NONE.keys()) & BACKENDS.keys()
    assert not _KINDS.keys() & _NONE.keys()
    assert _MORE.keys() <= _KINDS.keys()


@pytest.mark.parametrize(
    ("scheme", "meant"),
    [
        ("sqlit", "sqlite"),
        ("etcd3", "etcd"),
        ("nat", "nats"),
        ("zookeper", "zookeeper"),
        ("postgre", "postgresql"),
        ("postgres+asyncpg", "postgres"),
        ("rabbitmq", "amqp"),
        ("sentinel+x", "redis+sentinel"),
    ],
)
def test_a_scheme_that_is_close_is_suggested(scheme: str, meant: str) -> None:
    assert f"no backend serves {scheme!r}; did you mean {meant!r}? (known: amqp, " in refusal_of_scheme(
        scheme, BACKENDS
    )


@pytest.mark.parametrize("scheme", ["ftp", "gopher", "ldap", "mail", "square", "grpc", "reddit"])
def test_a_scheme_that_is_not_close_is_told_what_there_is(scheme: str) -> None:
    assert refusal_of_scheme(scheme, BACKENDS) == f"no backend serves {scheme!r} (known: {', '.join(sorted(BACKENDS))})"


@pytest.mark.parametrize("scheme", ["mysql", "mysql+pymysql", "mongodb+srv", "sqlserver", "kafka"])
def test_a_store_that_is_none_of_ours_is_named_with_those_that_are(scheme: str) -> None:
    refusal = refusal_of_scheme(scheme, BACKENDS)
    assert "tenure doesn't work on " in refusal
    assert refusal.endswith(f"; there are {', '.join(sorted(BACKENDS))}")
    assert "did you mean" not in refusal


def test_a_long_text_is_not_looked_at() -> None:
    assert refusal_of_form("a:1," * (LOOKED_AT // 4)) is None
    assert refusal_of_form("a:1," * LOOKED_AT) is None


def test_what_has_a_scheme_of_ours_is_a_url_whatever_its_form() -> None:
    assert str(Url.parse("memory:1")) == "memory:1"
