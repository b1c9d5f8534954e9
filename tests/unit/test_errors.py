"""The tree of errors."""

from __future__ import annotations

import pickle
import traceback

import pytest

import tenure
from tenure import _registry as registry
from tenure import errors
from tenure._backends.sqlite.client import DiskFullError
from tenure._opened import Fact
from tenure._queue.outgoing import checked
from tenure._url import Url
from tenure.testing import loop


@pytest.mark.parametrize("name", ["ConfigError", "BackendNotInstalled", "Unavailable", "TermLost", "LockLost"])
def test_one_except_catches_all(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.TenureError)
    assert getattr(tenure, name) is error


def test_an_error_has_the_code_of_its_class() -> None:
    assert (errors.TermLost.code, errors.TermLost("over").code) == ("term-lost", "term-lost")
    assert errors.MessageRefused("too large").code == "message-refused"
    assert DiskFullError("full").code == "sqlite-disk-full"


def test_a_fact_without_advice_has_nothing_to_explain() -> None:
    assert Fact("memory", "10 of 100", "", "redis-full").code == ""
    assert Fact("memory", "100 of 100", "it is full", "redis-full").code == "redis-full"


def test_a_wait_that_is_over_is_caught_either_way() -> None:
    assert issubclass(errors.TimedOut, errors.TenureError)
    assert issubclass(errors.TimedOut, TimeoutError)
    assert str(pickle.loads(pickle.dumps(errors.TimedOut("too late")))) == "too late"


def test_a_missing_driver_is_a_config_error() -> None:
    assert issubclass(errors.BackendNotInstalled, errors.ConfigError)
    assert not issubclass(errors.Unavailable, errors.ConfigError)


def test_a_missing_driver_gives_one_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"redis": ("no_such_driver", "redis")}
    monkeypatch.setattr(registry, "BACKENDS", missing)
    with pytest.raises(tenure.BackendNotInstalled, match=r"run: pip install 'tenure\[redis\]'") as caught:
        registry.load(Url.parse("redis://host"))
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


async def test_with_instead_of_async_with_points_to_the_one_for_threads() -> None:
    backend = tenure.connect("memory:")
    with pytest.raises(TypeError, match=r"with tenure\.sync\.connect"), backend:  # type: ignore[attr-defined]
        pass


def test_without_asyncio_the_error_names_asyncio() -> None:
    async def connected() -> None:
        async with tenure.connect("memory:"):
            pass

    with pytest.raises(tenure.ConfigError, match=r"needs asyncio.*under Trio, use tenure\.sync\.connect in a thread"):
        connected().send(None)  # as another loop would run it


def test_in_virtual_time_the_error_names_connect_here() -> None:
    async def connected() -> None:
        async with tenure.connect("memory:"):
            pass

    with pytest.raises(tenure.ConfigError, match=r"runs in virtual time; connect with tenure\.testing\.connect_here"):
        loop.run(connected())


def test_a_body_that_is_too_large_names_the_possible_limit() -> None:
    with pytest.raises(tenure.MessageRefused, match=r"raise that setting of the queue: await queue\.declare\(body_max"):
        checked([tenure.Outgoing(b"12")], 1, 2)
    with pytest.raises(tenure.MessageRefused, match=r"^message 1 of 2: body \(2 bytes\).* this store.* none") as caught:
        checked([tenure.Outgoing(b"1"), tenure.Outgoing(b"12")], 1, 1)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):  # as from a handler's process
        assert (error.index, error.reason.partition(";")[2]) == (1, " send a reference to it")
        assert str(error) == str(caught.value)


def test_the_nearest_name_is_suggested_if_it_is_near() -> None:
    assert errors.nearest("synchronus", ["busy", "synchronous"]) == "; did you mean 'synchronous'?"
    assert errors.nearest("zzz", ["busy", "synchronous"]) == ""
    assert errors.nearest("zzz", []) == ""
