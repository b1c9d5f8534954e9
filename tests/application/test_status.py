"""The status of a candidate, for probes: in virtual time on a store that can be cut off, and from threads."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict
from typing import get_args
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tenure import CandidateStatus
from tenure._election.handle import _STATES
from tenure._election.machine import State
from tenure._election.term import Term
from tenure.errors import Unavailable
from tests.application.test_elector import TIMING, ElectionSetup, elected, forever, in_virtual_time

ANSWERED_WITHIN = TIMING.ttl + 2 * TIMING.retry_every


def deaf_until(go_on: asyncio.Event) -> tenure.Work:
    """Return work that can't be cancelled, and ends when *go_on* is set."""

    async def work(term: Term) -> None:
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await go_on.wait()

    return work


def test_every_state_of_the_machine_has_a_name_for_users() -> None:
    assert set(_STATES) == set(State)
    assert set(_STATES.values()) == set(get_args(tenure.CandidateState))


@in_virtual_time
async def test_without_a_candidate_it_is_idle(setup: ElectionSetup) -> None:
    election = setup.candidate()
    idle = CandidateStatus("chair")
    assert await election.status() == idle
    assert (idle.state, idle.is_live, idle.is_ready) == ("idle", True, False)

    async def work(term: Term) -> None:
        pass

    await election.run(work)
    assert await election.status() == idle


@in_virtual_time
async def test_a_leader_is_trusted_since_its_last_answered_request(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    election = setup.candidate(driver)
    leading = asyncio.create_task(election.run(forever))
    await elected(setup)
    began = await election.status()
    assert (began.state, began.token, began.problem) == ("leading", 1, "")
    assert (began.is_live, began.is_ready, began.overran) == (True, True, False)
    await asyncio.sleep(1.0)
    later = await election.status()
    assert began.trusted_for - later.trusted_for == pytest.approx(1.0)
    assert began.answered_ago is not None
    assert later.answered_ago == pytest.approx(began.answered_ago + 1.0)

    store.cut = True  # it leads on, as long as it can be sure
    while not (missed := await election.status()).problem:
        await asyncio.sleep(0.1)
    assert (missed.problem, missed.state, missed.is_ready) == ("the connection is cut", "leading", True)
    assert missed.answered_ago is not None
    assert missed.answered_ago > TIMING.renew_every / 2

    store.cut = False
    while (renewed := await election.status()).problem:
        await asyncio.sleep(0.1)
    assert renewed.trusted_for > missed.trusted_for
    leading.cancel()


@in_virtual_time
async def test_a_leader_that_the_store_does_not_answer_is_not_ready_after_its_term_but_live(
    setup: ElectionSetup,
) -> None:
    store, driver = setup.connect()
    election = setup.candidate(driver)
    leading = asyncio.create_task(election.run(forever))
    await elected(setup)
    store.cut = True
    while (status := await election.status()).state == "leading":
        assert status.is_ready == (status.trusted_for > 0.0)
        await asyncio.sleep(0.1)
    assert (status.state, status.is_live, status.is_ready) == ("ending", True, False)
    while (status := await election.status()).state == "ending" or status.is_ready:  # the last answer is not old yet
        await asyncio.sleep(0.1)
    assert (status.state, status.token, status.trusted_for) == ("standing by", None, 0.0)
    assert status.problem == "the connection is cut"
    assert status.answered_ago == pytest.approx(ANSWERED_WITHIN, abs=0.2)
    assert status.is_live
    leading.cancel()


@in_virtual_time
async def test_a_candidate_that_stands_by_is_always_ready_while_the_store_answers(setup: ElectionSetup) -> None:
    leading = asyncio.create_task(setup.candidate().run(forever))
    await elected(setup)
    store, driver = setup.connect()
    election = setup.candidate(driver)
    waiting = asyncio.create_task(election.run(forever))
    await asyncio.sleep(1.0)
    for _ in range(2000):  # it asks only once per lease, as hints are to wake it
        status = await election.status()
        assert (status.state, status.token, status.is_ready) == ("standing by", None, True)
        await asyncio.sleep(0.1)

    store.cut = True
    while (status := await election.status()).is_ready:
        await asyncio.sleep(0.1)
    assert status.answered_ago == pytest.approx(ANSWERED_WITHIN, abs=0.2)
    assert (status.is_live, status.problem) == (True, "the connection is cut")

    store.cut = False
    while not (await election.status()).is_ready:
        await asyncio.sleep(0.1)
    leading.cancel()
    waiting.cancel()


@in_virtual_time
async def test_a_candidate_without_any_answer_is_not_ready(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    store.cut = True
    election = setup.candidate(driver)
    waiting = asyncio.create_task(election.run(forever))
    await asyncio.sleep(1.0)
    status = await election.status()
    assert status == CandidateStatus("chair", state="standing by", problem="the connection is cut")
    store.cut = False
    await elected(setup)
    assert (await election.status()).is_ready
    waiting.cancel()


@in_virtual_time
async def test_work_that_does_not_end_with_its_term_is_not_live(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    election = setup.candidate(driver)
    go_on = asyncio.Event()
    leading = asyncio.create_task(election.run(deaf_until(go_on)))
    await elected(setup)
    store.cut = True
    while (status := await election.status()).trusted_for > 0.0:
        assert status.is_live
        await asyncio.sleep(0.1)
    assert (status.state, status.token) == ("ending", 1)
    assert (status.overran, status.is_live, status.is_ready) == (True, False, False)
    go_on.set()
    await asyncio.sleep(1.0)
    ended = await election.status()
    assert (ended.state, ended.is_live) == ("standing by", True)
    leading.cancel()


@in_virtual_time
async def test_work_that_outlives_its_backend_is_not_live(setup: ElectionSetup) -> None:
    _, driver = setup.connect()
    election = setup.candidate(driver)
    go_on = asyncio.Event()
    leading = asyncio.create_task(election.run(deaf_until(go_on)))
    await elected(setup)
    await driver.close()
    status = await election.status()
    assert (status.state, status.overran, status.is_live, status.is_ready) == ("idle", True, False, False)
    go_on.set()
    with pytest.raises(Unavailable, match="work was still running"):
        await leading
    assert (await election.status()).is_live


@in_virtual_time
async def test_a_resignation_is_an_end_with_time_left(setup: ElectionSetup) -> None:
    election = setup.candidate()
    go_on = asyncio.Event()

    async def work(term: Term) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await go_on.wait()

    leading = asyncio.create_task(election.run(work))
    await elected(setup)
    await election.resign(wait=False)
    status = await election.status()
    assert (status.state, status.token, status.is_live, status.is_ready) == ("ending", 1, True, False)
    assert status.trusted_for > 0.0
    go_on.set()
    leading.cancel()


@in_virtual_time
async def test_a_withheld_renewal_is_a_problem_and_no_answer(setup: ElectionSetup) -> None:
    election = setup.candidate(stall_after=1.0)
    leading = asyncio.create_task(election.run(forever))
    await elected(setup)
    while not (status := await election.status()).problem:
        await asyncio.sleep(0.1)
    assert status.problem.startswith("no term.beat() for ")
    assert status.answered_ago is not None
    assert status.answered_ago > 1.0
    leading.cancel()


async def test_it_is_asked_for_on_the_renewal_thread_and_is_plain_data() -> None:
    async with tenure.connect(f"memory:{uuid4().hex}") as backend:
        election = backend.election("chair")
        async with election.campaign() as term:
            status = await election.status()
            assert (status.name, status.token) == ("chair", term.token)
            assert CandidateStatus(**json.loads(json.dumps(asdict(status)))) == status


def test_it_is_there_for_threads() -> None:
    with tenure.sync.connect(f"memory:{uuid4().hex}") as backend:
        election = backend.election("chair")
        assert not election.status().is_ready
        with election.campaign() as term:
            status = election.status()
            assert (status.state, status.token, status.is_ready) == ("leading", term.token, True)
        assert election.status().state == "idle"
