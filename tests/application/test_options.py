"""Unknown options are refused, in both interfaces."""

from __future__ import annotations

from typing import Any

import pytest

import tenure
import tenure.sync

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("election", {"renew_evry": 3}, r"election\(\) has no option 'renew_evry'; did you mean 'renew_every'\?"),
    ("election", {"zzz": 3}, r"election\(\) has no option 'zzz'$"),
    ("queue", {"max_delivery": 3}, r"queue\(\) has no option 'max_delivery'; did you mean 'max_deliveries'\?"),
]


@pytest.mark.parametrize(("verb", "options", "message"), WRONG)
async def test_an_unknown_option_is_refused_with_the_nearest_one(
    verb: str, options: dict[str, Any], message: str
) -> None:
    async with tenure.connect("memory:") as backend:
        with pytest.raises(TypeError, match=message):
            getattr(backend, verb)("name", **options)
    with tenure.sync.connect("memory:") as for_threads, pytest.raises(TypeError, match=message):
        getattr(for_threads, verb)("name", **options)


async def test_an_unknown_setting_is_not_declared() -> None:
    async with tenure.connect("memory:") as backend:
        wrong: dict[str, Any] = {"locks": 3}
        with pytest.raises(TypeError, match=r"declare\(\) has no option 'locks'; did you mean 'lock'\?"):
            await backend.queue("orders").declare(**wrong)


async def test_none_counts_as_not_given() -> None:
    async with tenure.connect("memory:") as backend:
        election = backend.election("name", ttl=None, grace=None, health=None, drift=None)
        assert election.timing == tenure.Timing(15.0)
        options: dict[str, Any] = {"lock": None, "max_deliveries": 3}
        assert (await backend.queue("orders", **options).declare()).lock == 30.0
