"""What others have written into a store of leases: one bad record or name costs no other term, and hides no other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

import tenure
from tenure import dashboard
from tenure._backends.memory.client import Claim
from tenure._election.elector import Election
from tenure._election.store import NAME_MAX, usable_names
from tenure._lease import Grant, Granted, Lost, NoAnswer
from tenure._overview import look
from tenure._queue.message import Stats
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import ConfigError, Unavailable
from tenure.events import RenewalMissed, TermBegan
from tests.application.test_elector import TIMING, ElectionSetup, FaultyStore, elected, forever, in_virtual_time
from tests.durations import until


class EditedStore(FaultyStore):
    """A store in which some records can't be read: it fails a request for many as it fails one for each of them."""

    bad: frozenset[str] = frozenset()
    error: Exception = ValueError("the record can't be read")

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        answers = await super().renew(grants, ttl)
        if any(grant.name in self.bad for grant in grants):
            raise self.error
        return answers


async def leading(setup: ElectionSetup, count: int) -> tuple[EditedStore, list[asyncio.Task[None]]]:
    _, driver = setup.connect()
    store = driver.store = EditedStore(setup.store)
    elections = [
        Election(f"chair {n}", TIMING, driver=driver, renewal_thread=RenewalThread.here(), on_event=setup.events.append)
        for n in range(count)
    ]
    tasks = [asyncio.create_task(election.run(forever)) for election in elections]
    await elected(setup, count)
    store.renewals.clear()
    return store, tasks


@in_virtual_time
async def test_a_record_that_cannot_be_read_costs_no_other_term(setup: ElectionSetup) -> None:
    store, tasks = await leading(setup, 64)
    store.bad = frozenset({"chair 7", "chair 40"})
    await asyncio.sleep(10 * TIMING.ttl)
    missed = setup.emitted(RenewalMissed)
    assert {event.name for event in missed} == store.bad
    assert {event.why for event in missed} == {"the store failed with ValueError: the record can't be read"}
    assert sum(event.name not in store.bad for event in setup.emitted(TermBegan)) == 62
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@in_virtual_time
async def test_a_store_that_is_away_is_not_asked_about_each(setup: ElectionSetup) -> None:
    store, tasks = await leading(setup, 64)
    store.bad, store.error = frozenset({"chair 7"}), Unavailable("the store is away")
    await asyncio.sleep(TIMING.renew_every * 1.5)
    assert store.renewals
    assert {len(names) for names in store.renewals} == {64}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


# --- names and overviews -----------------------------------------------------------------------------------------

NO_NAMES: list[Any] = ["", "x" * (NAME_MAX + 1), "a\0b", "\ud800", None, 7, b"x"]


def test_a_listed_name_that_no_election_can_have_is_left_out() -> None:
    usable = ["a", "\n", "größe 🦒", "x" * NAME_MAX]
    assert usable_names([*NO_NAMES, *usable, *NO_NAMES]) == usable


async def test_a_name_that_no_election_can_have_hides_no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tenure.connect("memory:") as backend:
        claims = backend._connection.require_leases()._memory.claims  # type: ignore[attr-defined]
        claims |= {name: Claim() for name in NO_NAMES[:4]}
        leases = type(backend._connection.require_leases())
        inspect_many = leases.inspect_many

        async def strict(self: Any, names: Sequence[str]) -> Any:
            assert usable_names(names) == names
            return await inspect_many(self, names)

        monkeypatch.setattr(leases, "inspect_many", strict)
        async with backend.election("chair").campaign() as term:
            leaders = await backend.leaders()
            assert list(leaders) == ["chair"]
            assert leaders["chair"] is not None
            assert leaders["chair"].token == term.token
            assert await backend.vacancies() == {}


async def test_a_queue_that_cannot_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tenure.connect("memory:") as backend:
        for name in ("a", "b", "c"):
            await backend.queue(name).send(b"x")
        running = asyncio.create_task(backend.schedule("nightly", 3600.0, queue="c").run())
        await until(backend.schedules)
        running.cancel()
        broker = type(backend._broker_of(backend._connection.require_open()[1]))
        real = broker.stats, broker.names

        async def stats(self: Any, name: str) -> Stats:
            if name == "b":
                raise ConfigError("the record of b can't be read")
            return await real[0](self, name)

        async def names(self: Any) -> Sequence[str]:
            return [*await real[1](self), "", "$", "x" * 1_000, " "]

        monkeypatch.setattr(broker, "stats", stats)
        monkeypatch.setattr(broker, "names", names)
        assert await backend.queues() == ["a", "b", "c"]
        assert [one.name for one in await backend.schedules()] == ["nightly"]
        found = await look(backend)
        assert found.queues is not None
        assert list(found.queues) == ["a", "c"]
        assert found.unreadable == {"b": "the record of b can't be read"}
        assert [one.name for one in found.schedules] == ["nightly"]
        transport = httpx.ASGITransport(dashboard.app(backend))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as browser:
            assert "the record of b can&#39;t be read" in (await browser.get("/")).text

        async def away(self: Any, name: str) -> Stats:
            raise Unavailable("the store is away")

        monkeypatch.setattr(broker, "stats", away)
        with pytest.raises(Unavailable):
            await look(backend)
