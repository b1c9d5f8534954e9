"""The tree of errors."""

from __future__ import annotations

import pytest

import tenure
from tenure import errors


@pytest.mark.parametrize("name", ["ConfigError", "BackendNotInstalled", "Unavailable", "TermLost", "LockLost"])
def test_one_except_catches_all(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.TenureError)
    assert getattr(tenure, name) is error


def test_a_missing_driver_is_a_matter_of_configuration() -> None:
    assert issubclass(errors.BackendNotInstalled, errors.ConfigError)
    assert not issubclass(errors.Unavailable, errors.ConfigError)


def test_the_nearest_name_is_suggested_if_it_is_near() -> None:
    assert errors.nearest("synchronus", ["busy", "synchronous"]) == "; did you mean 'synchronous'?"
    assert errors.nearest("zzz", ["busy", "synchronous"]) == ""
    assert errors.nearest("zzz", []) == ""
