"""A leader is killed; the other side succeeds it soon after its session or lease has run out. No two lead at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.contest import Contest
from tests.interop.handovers import kill
from tests.interop.stores import PAIRS, SHORT, SLOW, Store, slug

each_client = pytest.mark.parametrize(("store", "client"), PAIRS, ids=[client for _, client in PAIRS])


@each_client
def test_a_killed_leader_is_succeeded(store: type[Store], client: str, tmp_path: Path) -> None:
    """The foreign client by ours, and ours by the foreign one."""
    with Contest(store, client, tmp_path, SHORT) as contest:
        successions = [(contest.ours(), contest.foreign(), f"killed-{slug(client)}")]
        if client not in SLOW:  # those, `make proof` waits for
            successions.append((contest.foreign(), contest.ours(), f"killed-foreign-{slug(client)}"))
        kill(contest, successions, SHORT)
