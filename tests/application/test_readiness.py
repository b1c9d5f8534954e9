"""The readiness of a service as a truth table: handlers, leaders and schedules, each on a store that answers or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

import pytest

import tenure
from tenure import CandidateStatus, HandlerStatus, ScheduleStatus, Service, ServiceStatus
from tenure._election import handle
from tenure._election.machine import Machine
from tenure._queue.consumer import Consumer
from tenure._queue.effects import Accepted, Claimed, PumpEffect
from tenure._queue.pump import Pump
from tenure._queue.session_pump import SessionPump
from tenure._service.parts import Consumption, Leadership, Sending
from tenure.testing import connect_here
from tenure.testing.loop import run
from tests.application.outages import Answers, Proxy, proxies

State = Literal["fine", "silent", "failed", "recovered"]
"""How the store answers a part: always; never; with failures; or again, after it was silent."""

Row = tuple[State, State, State]
"""The states of the handlers, the leaders and the schedules."""

ANSWERS: dict[State, Answers] = {"fine": "fine", "silent": "silent", "failed": "fails", "recovered": "silent"}
VERBS = (
    ("receive", "accept", "holding", "settle", "release"),
    ("acquire", "renew", "release", "inspect"),
    ("schedules", "advance"),
)
SETTLED = 40.0
"""Seconds in which everything has begun, has noticed that there is no answer, or has recovered."""


def service_on(backend: tenure.Backend) -> Service:
    service = Service(backend)

    @service.handler("orders")
    async def handle_order(message: tenure.Message) -> None: ...

    @service.handler("sessions", sessions=True)
    async def handle_session(message: tenure.Message) -> None: ...

    @service.every("0 0 29 2 *", name="beat")  # so rarely that no message comes: readiness needs no traffic
    async def beat() -> None: ...

    @service.leader("chair")
    async def lead(term: tenure.Term) -> None:
        await asyncio.Event().wait()

    return service


async def shown_in(row: Row, *, leads: bool) -> tuple[ServiceStatus, ServiceStatus, ServiceStatus]:
    """Return the status of a service before, in the states of *row*, and when it has ended."""
    with proxies() as stores:
        async with connect_here() as backend:
            (store,) = stores
            if not leads:
                await store.leases.acquire("chair", "another", 1e4)
            service = service_on(backend)
            serving = asyncio.ensure_future(service.serve(sigterm=False))
            await asyncio.sleep(SETTLED)
            before = await service.status()
            parts: list[tuple[Proxy, Sequence[str], State]] = [
                (port, verbs, state)
                for port, verbs, state in zip((store.broker, store.leases, store.broker), VERBS, row, strict=True)
            ]
            for port, verbs, state in parts:
                port.set(ANSWERS[state], *verbs)
            await asyncio.sleep(SETTLED)
            for port, verbs, state in parts:
                if state == "recovered":
                    port.set("fine", *verbs)
            await asyncio.sleep(SETTLED)
            found = await service.status()
            store.set("fine")
            service.stop()
            await serving
            return before, found, await service.status()


def is_right(row: Row, *, leads: bool) -> bool:
    """Return whether the status of a service is as it should be in this row of the table."""
    before, found, after = run(shown_in(row, leads=leads), seed=1)
    has_handlers, has_leaders, _ = (state in ("fine", "recovered") for state in row)
    return (
        before.is_ready
        and before.leaders[0].state == ("leading" if leads else "standing by")
        and sorted((one.queue, one.is_ready) for one in found.handlers)
        == [(queue, has_handlers) for queue in ("beat", "orders", "sessions")]
        and [(one.name, one.is_ready) for one in found.leaders] == [("chair", has_leaders)]
        and [one.name for one in found.schedules] in (["beat"], [])  # what the store has shown, if it has
        and found.is_ready == (has_handlers and has_leaders)
        and found.is_live
        and after == ServiceStatus()
    )


ROWS: list[Row] = list(product(get_args(State), repeat=3))
ONE_IS_NOT_FINE = sorted((row for row in ROWS if row.count("fine") == 2), reverse=True)
"""The rows in which one part is not fine."""


@pytest.mark.parametrize("leads", [True, False], ids=["leading", "standing by"])
@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_service_is_ready_if_handlers_and_leaders_are_answered(row: Row, leads: bool) -> None:
    assert is_right(row, leads=leads)


# --- planted bugs ---


def leaders_always_seem_ready(patch: pytest.MonkeyPatch) -> None:
    status = Leadership.status

    async def ready(self: Leadership) -> Sequence[CandidateStatus]:
        return [replace(one, is_ready=True) for one in await status(self)]

    patch.setattr(Leadership, "status", ready)


def leaders_that_are_not_ready_do_not_count(patch: pytest.MonkeyPatch) -> None:
    status = Leadership.status

    async def ready(self: Leadership) -> Sequence[CandidateStatus]:
        return [one for one in await status(self) if one.is_ready]

    patch.setattr(Leadership, "status", ready)


def candidates_that_stand_by_always_seem_ready(patch: pytest.MonkeyPatch) -> None:
    status_of = handle._status_of

    def ready(machine: Machine, now: float) -> CandidateStatus:
        found = status_of(machine, now)
        return replace(found, is_ready=found.is_ready or found.state == "standing by")

    patch.setattr(handle, "_status_of", ready)


def candidates_without_an_answer_are_not_live(patch: pytest.MonkeyPatch) -> None:
    status_of = handle._status_of

    def dead(machine: Machine, now: float) -> CandidateStatus:
        found = status_of(machine, now)
        return replace(found, is_live=not found.problem)

    patch.setattr(handle, "_status_of", dead)


def handlers_always_seem_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consumer, "is_ready", True)


def handlers_that_are_not_ready_do_not_count(patch: pytest.MonkeyPatch) -> None:
    status = Consumption.status

    async def ready(self: Consumption) -> Sequence[HandlerStatus]:
        return [one for one in await status(self) if one.is_ready]

    patch.setattr(Consumption, "status", ready)


def an_empty_claim_is_no_answer(patch: pytest.MonkeyPatch) -> None:
    claimed = Pump._claimed

    def forgetful(self: Pump, answer: Claimed, now: float, effects: list[PumpEffect]) -> None:
        misses = self.misses
        claimed(self, answer, now, effects)
        self.misses = misses

    patch.setattr(Pump, "_claimed", forgetful)


def no_accept_is_an_answer(patch: pytest.MonkeyPatch) -> None:
    accepted = SessionPump._accepted

    def forgetful(self: SessionPump, event: Accepted, asked_at: float, now: float, effects: list[PumpEffect]) -> None:
        misses = self.misses
        accepted(self, event, asked_at, now, effects)
        self.misses = misses

    patch.setattr(SessionPump, "_accepted", forgetful)


def a_schedule_without_an_answer_counts(patch: pytest.MonkeyPatch) -> None:
    status = Sending.status

    async def last_of_all(self: Sending) -> Sequence[HandlerStatus | ScheduleStatus]:
        machine = self._schedule._machine
        found = await status(self)
        return found if machine is not None and not machine._misses else [*found, HandlerStatus("beat", 1, 0, False)]

    patch.setattr(Sending, "status", last_of_all)


PLANTED = [
    leaders_always_seem_ready,
    leaders_that_are_not_ready_do_not_count,
    candidates_that_stand_by_always_seem_ready,
    candidates_without_an_answer_are_not_live,
    handlers_always_seem_ready,
    handlers_that_are_not_ready_do_not_count,
    an_empty_claim_is_no_answer,
    no_accept_is_an_answer,
    a_schedule_without_an_answer_counts,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_of_readiness_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert not all(is_right(row, leads=leads) for row in ONE_IS_NOT_FINE for leads in (True, False))
