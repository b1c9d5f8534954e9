"""A full disk: nothing more can be sent, and everything that removes messages still works."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tenure._backends import sqlite
from tenure._backends.sqlite.reserve import Reserve
from tenure._lease import Granted
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, SETTLED, Abandon, Complete, DeadLetter, Settlement
from tenure._url import Url
from tenure.errors import Unavailable
from tests.disks import fill, small_disk

BODY = bytes(1_000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    with small_disk(tmp_path / "disk") as place:
        yield place


def opened(disk: Path) -> sqlite.SqliteBackend:
    return sqlite.open(Url.parse(f"sqlite:///{disk}/x.db?busy=1"))


async def send_until_full(backend: sqlite.SqliteBackend, most: int = 10_000) -> int:
    sent = 0
    with suppress(Unavailable):
        while sent < most:
            await backend.broker.send("q", [Outgoing(BODY) for _ in range(10)])
            sent += 10
    return sent


async def drain(backend: sqlite.SqliteBackend) -> int:
    done = 0
    while deliveries := (await backend.broker.receive("q", 20, 10.0)).deliveries:
        await backend.broker.renew(deliveries, 10.0)
        settlements = [Settlement(one, COMPLETE) for one in deliveries]
        assert list(await backend.broker.settle(settlements)) == [SETTLED] * len(deliveries)
        done += len(deliveries)
    return done


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_queue_on_a_full_disk_can_be_drained(disk: Path, restarted: bool) -> None:
    backend = opened(disk)
    sent = await send_until_full(backend)
    assert 300 < sent < 10_000
    if restarted:
        await backend.close()
        backend = opened(disk)
    with pytest.raises(Unavailable, match="full"):
        await backend.broker.send("q", [Outgoing(bytes(500_000))])
    [delivery] = (await backend.broker.receive("q", 1, 10.0)).deliveries
    await backend.broker.settle([Settlement(delivery, Abandon())])
    [delivery] = (await backend.broker.receive("q", 1, 10.0)).deliveries
    await backend.broker.settle([Settlement(delivery, DeadLetter("bad"))])
    assert await drain(backend) == sent - 1
    assert await backend.broker.stats("q") == Stats(dead=1)
    assert await send_until_full(backend) > sent / 2  # and there is room again
    await backend.close()


async def test_headers_take_room_too(disk: Path) -> None:
    backend = opened(disk)
    sent = 0
    with pytest.raises(Unavailable, match="full"):
        while True:
            await backend.broker.send("q", [Outgoing(headers={"long": "x" * 60_000})])
            sent += 1
    fill(disk)
    assert await drain(backend) == sent
    await backend.close()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("count", [10, 300])
async def test_a_disk_that_another_program_has_filled(disk: Path, restarted: bool, count: int) -> None:
    backend = opened(disk)
    assert await send_until_full(backend, count) == count
    answer = await backend.leases.acquire("name", "ann#1", 60)
    assert isinstance(answer, Granted)
    fill(disk)
    if restarted:
        await backend.close()
        backend = opened(disk)
    assert list(await backend.leases.renew([answer.grant], 60)) == [Granted(answer.grant)]
    assert await drain(backend) == count
    assert await backend.broker.stats("q") == Stats()
    await backend.leases.release(answer.grant)
    (disk / "ballast").unlink()
    await backend.broker.send("q", [Outgoing(BODY)])
    await backend.close()


async def test_a_batch_that_does_not_fit_does_not_prevent_settling(disk: Path) -> None:
    backend = opened(disk)
    await send_until_full(backend, 20)
    deliveries = (await backend.broker.receive("q", 20, 10.0)).deliveries
    broker = backend.broker
    large = [Outgoing(bytes(900_000)), Outgoing(bytes(900_000))]
    requests: list[Awaitable[object]] = [
        broker.send("q", large),
        broker.renew(deliveries, 10.0),
        broker.send("q", large),
        broker.settle([Settlement(one, COMPLETE) for one in deliveries]),
    ]
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert [isinstance(answer, Unavailable) for answer in answers] == [True, False, True, False]
    assert await broker.stats("q") == Stats()
    await backend.close()


async def test_a_completion_and_what_it_sends_are_kept_together_or_not_at_all(disk: Path) -> None:
    backend = opened(disk)
    broker = backend.broker
    await send_until_full(backend)
    first, second = (await broker.receive("q", 2, 60.0)).deliveries
    before = await broker.stats("q")
    done = bytes(150_000)
    with pytest.raises(Unavailable, match="full"):
        await broker.send("replies", [Outgoing(done)])  # the reserve is the only room
    reply = Complete(sends=(("replies", Outgoing(done, id="reply")),), remember=60.0)
    assert list(await broker.settle([Settlement(first, reply)])) == [SETTLED]
    assert await broker.handled("q", [first.id]) == [True]
    large = Complete(sends=(("replies", Outgoing(b"small")), ("replies", Outgoing(bytes(4_000_000)))), remember=60.0)
    with pytest.raises(Unavailable, match="full"):
        await broker.settle([Settlement(second, large)])
    assert replace(await broker.stats("q"), oldest_age=0.0) == replace(before, locked=1, oldest_age=0.0)
    assert await broker.handled("q", [second.id]) == [False]
    [sent] = (await broker.receive("replies", 10, 60.0)).deliveries
    assert (sent.id, sent.body) == ("reply", done)
    assert list(await broker.settle([Settlement(second, COMPLETE), Settlement(sent, COMPLETE)])) == [SETTLED] * 2
    await backend.close()


async def test_the_diagnosis_says_that_it_is_full(disk: Path) -> None:
    backend = opened(disk)
    await backend.describe()
    fill(disk)
    with pytest.raises(Unavailable, match="is full"):
        await backend.describe()
    await backend.close()


LIMITED = """
import asyncio, resource, sys
from tenure._backends import sqlite
from tenure.errors import Unavailable
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Settlement
from tenure._url import Url

async def main():
    backend = sqlite.open(Url.parse(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, 2 * 2**20))
    sent = done = 0
    try:
        while sent < 10_000:
            await backend.broker.send("q", [Outgoing(bytes(1_000))] * 10)
            sent += 10
    except Unavailable:
        pass
    await backend.close()
    backend = sqlite.open(Url.parse(sys.argv[1]))
    while deliveries := (await backend.broker.receive("q", 20, 10.0)).deliveries:
        await backend.broker.settle([Settlement(one, COMPLETE) for one in deliveries])
        done += len(deliveries)
    print(sent, done)
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="limits on files are tried on Linux")
def test_a_file_size_limit_is_handled_like_a_full_disk(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", LIMITED, f"sqlite:///{tmp_path}/x.db"], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    sent, done = map(int, answer.stdout.split())
    assert 500 < sent == done < 10_000


# --- the file ---


async def test_another_file_in_the_reserves_place_is_left_alone(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "x.db-reserve"
    victim.write_bytes(b"dear")
    for plant in (place.write_bytes, lambda _: place.symlink_to(victim), lambda _: place.hardlink_to(victim)):
        plant(b"dear")
        backend = opened(tmp_path)
        assert await send_until_full(backend, 10) == 10
        await backend.close()
        reserve = Reserve(str(tmp_path / "x.db"))
        assert reserve.give_up() is False
        assert victim.read_bytes() == place.read_bytes() == b"dear"
        place.unlink()


async def test_a_deleted_reserve_is_made_again(tmp_path: Path) -> None:
    backend, place = opened(tmp_path), tmp_path / "x.db-reserve"
    for _ in range(2):
        assert await send_until_full(backend, 200) == 200
        assert place.stat().st_blocks * 512 >= 2**20
        place.unlink()
    await backend.close()
