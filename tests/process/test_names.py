"""Hundreds of names in one process whose limit of open files is low, on every store with elections."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from benchmarks.names import COUNTS, STORES
from tests.docs.pages import table
from tests.held_names import Holding, holding


@dataclass(frozen=True)
class Limits:
    names: int = 300
    files: int = 256
    """As on macOS, unless that was raised."""


LIMITS = {store: Limits(names=max(counts)) for store, counts in COUNTS.items()}


def most_connections(store: str) -> int:
    """Return what the page says."""
    (row,) = [row for row in table("docs/scale.md", "store", "connections, at most") if row[0] == store]
    return int(row[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the files of a process from /proc")
@pytest.mark.parametrize("store", STORES)
def test_a_process_campaigns_for_many_names_with_few_files(store: str) -> None:
    limits, most = LIMITS.get(store, Limits()), most_connections(store)

    with STORES[store]() as running:

        def require(process: Holding) -> None:
            assert process.connections(*running.ports) <= most
            assert process.files <= most + FURTHER

        with holding(running.url, limits.names, "leads", limits.files) as leader:
            require(leader)
            with holding(running.url, limits.names, "stands", limits.files) as follower:
                require(follower)
                require(leader)


FURTHER = 16
"""Files of a process besides connections: of its loops, timers and locks; in SQLite, the database."""
