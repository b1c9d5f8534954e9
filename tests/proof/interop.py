"""Foreign clients and ours in the same elections: they hand over to each other, and their leaders are killed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.contest import Contest
from tests.interop.handovers import hand_over, kill
from tests.interop.stores import PAIRS, SLOW, TTL, Store, slug
from tests.proof.state import Part

PER_ROUND = 50
"""Hand-overs, half of them each way."""
REPLAY = ".venv/bin/python -m pytest tests/interop -k '{}'"


def wanted(each_way: int) -> int:
    """Return how many hand-overs there are in all."""
    return 2 * each_way * len(PAIRS)


def interop(part: Part, enough: int, folder: Path) -> Iterator[None]:
    """Run rounds from ``part.next_seed`` on, each with the next foreign client, until *enough* hand-overs were made."""
    while part.done < enough:
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
    """Let a client and ours hand over to each other, then kill each of them; return the slowest hand-over's seconds."""
    with Contest(store, client, folder) as contest:
        ours, foreign = contest.ours(), contest.foreign()
        name = f"proof-{seed}-{slug(client)}"
        took = hand_over(contest, ours, foreign, PER_ROUND, [name])
        successions = [(ours, contest.foreign(), f"{name}-ours"), (foreign, contest.ours(), f"{name}-foreign")]
        kill(contest, successions, SLOW.get(client, TTL))
        return max(took)
