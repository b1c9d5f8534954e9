"""Tokens of claims tell which process made them, and when."""

from __future__ import annotations

import threading
import time

import pytest

from tenure._backends.postgres.tokens import ClaimTokens, since_of
from tenure._backends.redis.tokens import holder_of, new_token
from tenure._runtime.process_name import process_name


def test_tokens_of_postgres_are_never_the_same() -> None:
    one = ClaimTokens()
    found: list[int] = []

    def take() -> None:
        found.extend(one.new() for _ in range(5_000))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 20_000
    assert {-token >> 32 for token in found} == {one.origin}
    assert all(-(2**63) < token < -(2**32) for token in found)


def test_a_token_of_postgres_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr("tenure._backends.postgres.tokens.time.time", lambda: now)
    token = ClaimTokens().new()
    for later in (0.0, 1.0, 86_400.0, 6 * 86_400.0):
        assert since_of(token, now + later) == pytest.approx(now, abs=0.001)
    assert since_of(token, now - 100.0) == now - 100.0  # the clock of another machine is behind
    assert since_of(123, now) is None  # of an older version


def test_many_claims_do_not_outrun_the_clock_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr("tenure._backends.postgres.tokens.time.time", lambda: now)
    one = ClaimTokens()
    found = [one.new() for _ in range(8_000)]
    assert len(set(found)) == 8_000
    assert since_of(found[-1], now) == now
    now += 3.0
    assert since_of(one.new(), now) == pytest.approx(now, abs=0.001)


def test_a_token_of_redis_tells_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time()
    token = new_token()
    holder, since = holder_of(token)
    assert holder == process_name()
    assert since is not None
    assert before - 0.001 <= since <= time.time() + 0.001
    assert new_token() != token
    assert holder_of("0123456789abcdef0123456789abcdef") == (None, None)
    monkeypatch.setattr("tenure._backends.redis.tokens.process_name", lambda: "a|b c\n:7")
    token = new_token()
    assert not set("| \n") & set(token)
    assert holder_of(token)[0] == "a?b?c?:7"
