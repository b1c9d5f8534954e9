"""A secret is a value that never prints."""

from __future__ import annotations

import copy
import json
import pickle
import traceback
from dataclasses import asdict, dataclass

import pytest

from tenure import Secret
from tenure._secret import revealed


@dataclass(frozen=True)
class Login:
    user: str
    password: Secret


@pytest.mark.parametrize("how", ["{}", "{!s}", "{!r}", "{!a}", "{:>20}", "{0}{0}"])
def test_no_way_of_printing_shows_it(how: str) -> None:
    shown = how.format(Secret("hush"))
    assert "hush" not in shown
    assert "***" in shown


def test_no_value_that_has_it_shows_it() -> None:
    login = Login("ann", Secret("hush"))
    shown = f"{login} {login!r} %s %r {asdict(login)} {[login.password]} {vars(login)}" % (
        login.password,
        login.password,
    )
    assert "hush" not in shown


def test_no_error_and_no_local_variable_shows_it() -> None:
    def refuse(password: Secret) -> None:
        raise ValueError(password)

    with pytest.raises(ValueError, match=r"\*\*\*") as raised:
        refuse(Secret("hush"))
    shown = traceback.TracebackException.from_exception(raised.value, capture_locals=True)
    assert "hush" not in "".join(line for line in shown.format() if 'hush")' not in line)


def test_it_is_neither_pickled_nor_written_as_json() -> None:
    with pytest.raises(TypeError, match="a secret is not pickled"):
        pickle.dumps(Secret("hush"))
    with pytest.raises(TypeError):
        json.dumps({"password": Secret("hush")})


def test_it_is_revealed_compared_and_copied() -> None:
    secret = Secret("hush")
    assert secret.reveal() == revealed(secret) == "hush"
    assert revealed(None) is None
    assert secret == Secret("hush") != Secret("loud")
    assert secret != "hush"
    assert len({secret, Secret("hush")}) == 1
    assert copy.copy(secret) is copy.deepcopy(secret) is secret
    assert secret
    assert not Secret("")
