"""Foreign clients and ours in the same elections: they hand over to each other, and their leaders are killed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.contest import Contest
from tests.interop.handovers import crowd, hand_over, kill
from tests.interop.stores import PAIRS, SHORT, SLOW, Store, slug
from tests.proof.state import Part

PER_ROUND = 50
"""Hand-overs, half of them each way."""
AT_ONCE = 5
"""Elections that are handed over at once where a side polls."""
TURNS = 20
"""Terms of the crowd of a round."""
REPLAY = ".venv/bin/python -m pytest tests/interop -k '{}'"


def wanted(each_way: int) -> int:
    """Return how many hand-overs there are in all."""
    return 2 * each_way * len(PAIRS)


def interop(part: Part, enough: int, folder: Path) -> Iterator[None]:
    """Run rounds from ``part.next_seed`` on, each with the next foreign client, which make *enough* hand-overs."""
    while part.next_seed * PER_ROUND < enough:
        seed = part.next_seed
        store, client = PAIRS[seed % len(PAIRS)]
        place = folder / f"interop-{seed}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            slowest = one_round(store, client, seed, place)
            part.notes[f"{client}, s"] = max(part.notes.get(f"{client}, s", 0.0), round(slowest, 3))
        except AssertionError as error:
            part.failed(f"round {seed}, {client}: {str(error) or repr(error)} (see {place})", REPLAY.format(client))
        except pytest.skip.Exception as reason:
            part.notes[f"{client} skipped"] = str(reason)
            shutil.rmtree(place)
        else:
            shutil.rmtree(place)
            part.done += PER_ROUND
        part.next_seed += 1
        yield


def one_round(store: type[Store], client: str, seed: int, folder: Path) -> float:
    """Let a client and ours hand over to each other, kill each of them, and let more of both stand at once.

    Returns:
        The seconds of the slowest hand-over.
    """
    name = f"proof-{seed}-{slug(client)}"
    with Contest(store, client, folder) as contest:
        names = [f"{name}-{number}" for number in range(1 if store.is_queued else AT_ONCE)]
        took = hand_over(contest, contest.ours(), contest.foreign(), PER_ROUND, names)
    with Contest(store, client, folder, SHORT) as contest:
        successions = [(contest.ours(), contest.foreign(), f"{name}-ours")]
        successions.append((contest.foreign(), contest.ours(), f"{name}-foreign"))
        kill(contest, successions, SLOW.get(client, SHORT))
    with Contest(store, client, folder, SHORT) as contest:
        crowd(contest, random.Random(seed), TURNS, f"{name}-crowd")
    return max(took)
