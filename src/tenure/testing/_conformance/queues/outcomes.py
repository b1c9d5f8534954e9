"""What becomes of messages when their deliveries end: every field, of a generated table of cases, against the rule.

Many cases go through a store together: those of one kind in as few queues as they can share, round after round.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace

import pytest

from tenure._queue.broker import EVERYTHING, Broker, Claim, LiveSelection
from tenure._queue.delivery_ends import LOCK_ENDED
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Attempt, DeadMessage, Death, Delivery, Died, LiveMessage, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Abandon, Defer, Settled, Settlement, Verdict
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.outcome_cases import (
    ENDINGS,
    LIVES,
    MANY,
    ROUND,
    VERDICT_AT,
    Case,
    Expected,
    Life,
    cases_of,
)
from tenure.testing._conformance.queues.steps import QueueSuite, expect_stats, needs

PEEKED = 30
"""The most messages in one queue: some stores show no more dead letters at once."""

LIMIT = 100
"""More than that."""

SLACK = 0.25
"""The share of a lock by which the moments of a store may be off, beside the real time that a test takes."""

PATIENCE = 60.0
"""The most real seconds for which what should be there is awaited, where counts aren't exact."""

Held = tuple["Message", Delivery, str]
"""A delivery, and how it is to end."""


class OutcomeTests(QueueSuite):
    """However deliveries end, each field of their messages is what the rule says; a store declares what differs."""

    @pytest.mark.parametrize("life", LIVES)
    async def test_every_end_of_a_delivery_has_its_outcome(self, harness: QueueHarness, name: str, life: Life) -> None:
        needs(harness.traits.dead_letters)
        if life in ("in a session", "deferred"):
            needs(harness.traits.sessions if life == "in a session" else harness.traits.deferral)
        cases = [case for case in cases_of(life) if harness.traits.delay != "impossible" or "delay" not in case.end]
        run = Run(harness, await harness.open(), name, cases)
        await run.play()
        check(harness, run.messages)


def check(harness: QueueHarness, messages: Sequence[Message]) -> None:
    """Fail if a message differs in a way that *harness* doesn't declare; or if what it declares doesn't happen."""
    unexplained: list[str] = []
    happened: set[str] = set()
    for message in messages:
        declared = [one for one in harness.deviations if re.search(one.cases, message.case.name)]
        for field, wanted, got in message.differences:
            fitting = [one.name for one in declared if field in one.fields]
            happened.update(fitting)
            if not fitting:
                unexplained.append(f"{message.case.name}: {field} is {got!r} instead of {wanted!r}")
    if unexplained:
        raise AssertionError("\n".join([f"{len(unexplained)} fields differ from the rule:", *unexplained]))
    for one in harness.deviations:
        if one.name not in happened and any(re.search(one.cases, message.case.name) for message in messages):
            raise AssertionError(f"the deviation {one.name!r} doesn't happen any more; declare it no longer")


class Message:
    """One case in a store: what was sent, what becomes of it by the rule, and where the store differs."""

    def __init__(self, case: Case, name: str, number: int, lock: float) -> None:
        self.case = case
        self.steps = case.steps
        self.expected = Expected(case)
        self.differences: list[tuple[str, object, object]] = []
        self.is_lost = False
        """Whether it isn't where it should be, so that nothing else can be compared."""
        self.died: list[tuple[int, str | None]] = []
        self.first: Delivery | DeadMessage | None = None
        self.id = f"{name}-{number}"
        self.sent = Outgoing(
            f"body {number}".encode(),
            id=self.id,
            headers={"case": case.name, "number": number},
            reply_to=f"{name}-answers",
            correlation_id=f"c-{number}",
            session=f"s-{number}" if case.life == "in a session" else None,
            expires_in=None if case.expires_in is None else case.expires_in * lock,
        )

    def step(self, kind: str) -> bool:
        """Whether that is done with it next."""
        return not self.is_lost and bool(self.steps) and self.steps[0][0] == kind

    @property
    def is_awaited(self) -> bool:
        """Whether it is to be received now."""
        if self.is_lost or not self.steps or self.expected.place != "ready":
            return False
        return self.steps[0][0] in ("receive", "receive deferred", "look")

    def compare(self, field: str, wanted: object, got: object) -> bool:
        """Note a difference."""
        if wanted != got:
            self.differences.append((field, wanted, got))
        return wanted == got

    def lose(self, field: str, wanted: object, got: object) -> None:
        """Note that it is elsewhere, and follow it no longer."""
        self.compare(field, wanted, got)
        self.is_lost = True

    def compare_sent(self, got: Delivery | DeadMessage | LiveMessage) -> None:
        """Compare what no delivery may change."""
        sent = self.sent
        wanted = (sent.id, sent.body, dict(sent.headers), sent.session, sent.priority, sent.reply_to)
        found = (got.id, got.body, dict(got.headers), got.session, got.priority, got.reply_to)
        self.compare("sent", (*wanted, sent.correlation_id), (*found, got.correlation_id))
        if self.first is None:
            assert not isinstance(got, LiveMessage)
            self.first = got
            return
        self.compare("sequence", self.first.sequence, got.sequence)
        if abs(self.first.enqueued_at - got.enqueued_at) > 0.002:
            self.compare("enqueued_at", self.first.enqueued_at, got.enqueued_at)

    def compare_delivery(self, got: Delivery) -> None:
        """Compare a live message as it is handed out."""
        self.compare("count", self.expected.notes.deliveries + 1, got.delivery_count)
        self.compare("death", None, got.death)
        self.expected.lock()
        self.compare_sent(got)

    def compare_dead(self, got: DeadMessage, until_now: float, within: float, lock: float) -> None:
        """Compare a dead letter, at a time *until_now*, which the test has taken *within* real seconds to reach."""
        notes = self.expected.notes
        self.compare_sent(got)
        self.compare("count", notes.deliveries, got.delivery_count)
        self.compare("reason", notes.reason, got.reason)
        self.compare("description", notes.description, got.description)
        self.compare("error", notes.error, got.error)
        self.compare("history", told(notes.history), told(got.history))
        moments = [one.at for one in got.history]
        if moments != sorted(moments) or (moments and moments[-1] > got.dead_at + 0.002):
            self.compare("times", "in order, the death last", [*moments, got.dead_at])
        wanted = [(f"attempt {one.number}", one.at, one.outcome != "expired") for one in notes.history]
        by_verdict = bool(notes.history) and notes.history[-1].at == notes.dead_at
        wanted.append(("dead", notes.dead_at, by_verdict and notes.history[-1].outcome != "expired"))
        found = [*moments, got.dead_at] if len(moments) == len(notes.history) else [got.dead_at]
        for (what, at, is_exact), moment in zip(wanted[-len(found) :], found, strict=True):
            since = (moment - got.enqueued_at) / lock
            latest = (at if is_exact else until_now) + SLACK + within / lock
            if not at - SLACK <= since <= latest:
                self.compare("dead_at" if what == "dead" else "times", f"{what}: {at:.2f} to {latest:.2f} locks", since)


def told(history: Iterable[Attempt]) -> list[tuple[object, ...]]:
    """Return the attempts without their times."""
    return [(one.number, one.outcome, one.error) for one in history]


class Group:
    """The messages of one queue."""

    def __init__(self, name: str, messages: list[Message]) -> None:
        self.name = name
        self.messages = messages
        self.by_id = {message.id: message for message in messages}
        case = messages[0].case
        self.life, self.most, self.lowered = case.life, case.most, case.lowered
        self.sessions: dict[str, SessionLock] = {}

    def step(self, kind: str) -> list[Message]:
        """Return the messages with which that is done next."""
        return [message for message in self.messages if message.step(kind)]


class Run:
    """Cases that go through one store together. Times are in locks."""

    def __init__(self, harness: QueueHarness, broker: Broker, name: str, cases: Sequence[Case]) -> None:
        self._harness, self._broker, self._lock = harness, broker, harness.lock_in_rounds or harness.lock
        self._began, self._now = time.monotonic(), 0.0
        self.messages = [Message(case, name, number, self._lock) for number, case in enumerate(cases)]
        queues: dict[object, list[Message]] = {}
        for message in self.messages:
            queues.setdefault(message.case.queue, []).append(message)
        parts = [found[at : at + PEEKED] for found in queues.values() for at in range(0, len(found), PEEKED)]
        self._groups = [Group(f"{name}-{number}", found) for number, found in enumerate(parts)]

    async def play(self) -> None:
        """Send all messages, let their deliveries end, and compare what becomes of them."""
        await asyncio.gather(*(self._begin(group) for group in self._groups))
        self._began = time.monotonic()
        while any(message.steps and not message.is_lost for message in self.messages):
            await self._round()
        await asyncio.gather(*(self._finish(group) for group in self._groups))
        if self._harness.traits.names_dead:
            for message in self.messages:
                if not message.is_lost:
                    message.compare("died", sorted(message.expected.reported), sorted(message.died))

    async def _pass(self, to: float) -> None:
        await self._harness.pass_time((to - self._now) * self._lock)
        self._now = to
        for message in self.messages:
            message.expected.wait(to)

    async def _begin(self, group: Group) -> None:
        most = MANY if group.life == "redriven" else group.most
        await self._broker.declare(group.name, {"lock": self._lock, "max_deliveries": most})
        await self._broker.send(group.name, [message.sent for message in group.messages])

    async def _wait(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for *condition* where counts aren't exact: what has just expired may come, or be dead, later."""
        with suppress(AssertionError):  # each difference is told
            await until(condition, within=0.0 if self._harness.traits.exact_stats else PATIENCE)

    # --- one round ---

    async def _round(self) -> None:
        begins = self._now
        received = await asyncio.gather(*(self._receive(group) for group in self._groups))
        held = [one for found in received for one in found]
        await self._pass(begins + VERDICT_AT)
        await self._settle(held)
        await asyncio.gather(*(self._look_at_delays(group) for group in self._groups))
        await asyncio.gather(*(self._look_at_letters(group) for group in self._groups))
        await self._pass(begins + ROUND)
        for message, _, end in held:
            if end == "lock ends":
                message.expected.end(LOCK_ENDED, self._now, is_told=False)

    async def _receive(self, group: Group) -> list[Held]:
        """Begin what is next with each message; return the deliveries, and how they are to end."""
        if redriven := group.step("redrive"):
            await self._redrive(group, redriven)
        last = [one for one in group.messages if len(one.steps) == 2 and not one.is_lost]
        if group.lowered and last:
            await self._broker.declare(group.name, {"max_deliveries": group.lowered})
            for message in last:
                message.expected.most = group.lowered
        if waiting := group.step("wait"):
            for message in waiting:
                message.steps.pop(0)
            return []
        for message in group.step("look"):
            if message.expected.place in ("gone", "dead"):
                message.steps.pop(0)  # all is compared in the end
        letters = group.step("receive dead")
        return [*await self._receive_live(group), *await self._receive_dead(group, letters)]

    async def _redrive(self, group: Group, redriven: list[Message]) -> None:
        letters = await self._letters(group)
        for message in redriven:
            self._compare_letter(message, letters)
        await self._broker.declare(group.name, {"max_deliveries": group.most})
        assert await self._broker.redrive(group.name, EVERYTHING, None) == len(letters)
        for message in redriven:
            message.expected.redrive(group.most)
            message.steps.pop(0)

    async def _receive_live(self, group: Group) -> list[Held]:
        awaited = {message.id: message for message in group.messages if message.is_awaited}
        came: dict[str, Delivery] = {}

        async def have_come() -> bool:
            for delivery in await self._claim(group):
                message = group.by_id[delivery.id]
                if delivery.id in awaited and delivery.id not in came:
                    came[delivery.id] = delivery
                elif not message.is_lost:
                    message.lose("place", message.expected.place, "ready")
            return all(message.id in came or self._may_be_missing(message) for message in awaited.values())

        await self._wait(have_come)
        held: list[Held] = []
        for id_, message in awaited.items():
            delivery = came.get(id_)
            if delivery is None:
                message.lose("place", "ready", "not handed out")
                continue
            message.compare_delivery(delivery)
            held.append((message, delivery, ""))
        deferred = [message for message in group.step("look") if message.expected.place == "deferred"]
        again = [one for one in held if one[0].step("receive deferred")]
        answers = await self._broker.settle([Settlement(delivery, Defer()) for _, delivery, _ in again])
        for (message, _, _), answer in zip(again, answers, strict=True):
            message.expected.end(Defer(), self._now)
            message.compare("answer", Settled(), answer)
        held = [one for one in held if one not in again]
        held += await self._receive_deferred(group, [*deferred, *(message for message, _, _ in again)])
        return [(message, delivery, message.steps.pop(0)[1]) for message, delivery, _ in held]

    def _may_be_missing(self, message: Message) -> bool:
        """Whether a store declares that it doesn't hand this out, so that it is not worth to wait for it."""
        return any(
            "place" in one.fields and re.search(one.cases, message.case.name) for one in self._harness.deviations
        )

    async def _claim(self, group: Group) -> list[Delivery]:
        """Claim all that is ready."""
        if group.life != "in a session":
            claim = await self._broker.receive(group.name, LIMIT, self._lock)
            self._note_deaths(group, claim.died)
            return list(claim.deliveries)
        found: list[Delivery] = []
        while isinstance(accepted := await self._broker.accept(group.name, None, self._lock), SessionLock):
            group.sessions[accepted.session] = accepted
            in_it = await self._broker.receive_session(accepted, LIMIT)
            if isinstance(in_it, Claim):
                self._note_deaths(group, in_it.died)
                found += in_it.deliveries
        self._note_deaths(group, accepted.died)
        return found

    def _note_deaths(self, group: Group, died: Iterable[Died]) -> None:
        for one in died:
            group.by_id[one.id].died.append((one.delivery_count, one.reason))

    async def _receive_deferred(self, group: Group, messages: list[Message]) -> list[Held]:
        if not messages:
            return []
        shown = {one.id: one for one in await self._broker.peek_deferred(group.name, LIMIT)}
        for message in messages:
            if (one := shown.get(message.id)) is None:
                message.lose("place", "deferred", "not there")
            else:
                message.compare("count", message.expected.notes.deliveries, one.delivery_count)
        claim = await self._broker.receive_deferred(group.name, [one.sequence for one in shown.values()], self._lock)
        came = {one.id: one for one in claim.deliveries}
        held: list[Held] = []
        for message in messages:
            if message.is_lost:
                continue
            if (delivery := came.get(message.id)) is None:
                message.lose("place", "deferred", "not handed out")
                continue
            message.compare_delivery(delivery)
            held.append((message, delivery, ""))
        return held

    # --- verdicts ---

    async def _settle(self, held: list[Held]) -> None:
        settled: list[Held] = []
        for message, delivery, end in held:
            if end == "release":
                await self._release(message)
                message.expected.end(ENDINGS[end], self._now, is_told=False)
            elif end != "lock ends":
                settled.append((message, delivery, end))
        verdicts = [Settlement(delivery, verdict_of(end, self._lock)) for _, delivery, end in settled]
        answers = await self._broker.settle(verdicts)
        for (message, delivery, end), answer in zip(settled, answers, strict=True):
            outcome = message.expected.end(ENDINGS[end], self._now)
            message.compare("answer", outcome.answer, answer)
            if isinstance(answer, Settled) and answer.reason is not None:
                message.compare("answer", outcome.answer.reason, answer.reason)
            if message.sent.session is not None and outcome.place != "delayed" and delivery.death is None:
                await self._release(message)

    async def _release(self, message: Message) -> None:
        group = next(one for one in self._groups if message in one.messages)
        assert message.sent.session is not None
        if (session := group.sessions.pop(message.sent.session, None)) is not None:
            message.compare("answer", Settled(), await self._broker.release(session))

    async def _look_at_delays(self, group: Group) -> None:
        delayed = {one.id: one for one in group.messages if one.expected.place == "delayed" and not one.is_lost}
        if not delayed or self._harness.traits.peek != "native":
            return
        shown = await self._broker.peek(group.name, LiveSelection(frozenset({"delayed"})), LIMIT)
        for one in shown:
            message = delayed.pop(one.id, None)
            if message is None:
                group.by_id[one.id].compare("place", group.by_id[one.id].expected.place, "delayed")
                continue
            message.compare_sent(one)
            message.compare("count", message.expected.notes.deliveries, one.delivery_count)
            assert one.due_at is not None
            due = (one.due_at - one.enqueued_at) / self._lock
            least = min(message.expected.due_at, message.expected.expires_at) - SLACK
            if not least <= due <= message.expected.due_at + SLACK + self._elapsed / self._lock:
                message.compare("due", message.expected.due_at, due)
        for message in delayed.values():
            message.lose("place", "delayed", "not there")

    @property
    def _elapsed(self) -> float:
        """The real seconds that this run has taken."""
        return time.monotonic() - self._began

    # --- dead letters ---

    async def _letters(self, group: Group) -> dict[str, DeadMessage]:
        """Return the dead letters, by id; where counts aren't exact, wait for those that should be there."""
        wanted = {one.id for one in group.messages if one.expected.place == "dead" and not one.is_lost}
        found: dict[str, DeadMessage] = {}

        async def are_there() -> bool:
            found.clear()
            found.update({one.id: one for one in await self._broker.peek_dead(group.name, EVERYTHING, LIMIT)})
            return wanted <= found.keys()

        await self._wait(are_there)
        return found

    def _compare_letter(self, message: Message, letters: dict[str, DeadMessage]) -> DeadMessage | None:
        letter = letters.get(message.id)
        if message.is_lost:
            return None
        if (letter is None) != (message.expected.place != "dead"):
            message.lose("place", message.expected.place, "dead" if letter else "not dead")
        elif letter is not None:
            message.compare_dead(letter, self._now, self._elapsed, self._lock)
            return letter
        return None

    async def _receive_dead(self, group: Group, messages: list[Message]) -> list[Held]:
        if not messages:
            return []
        letters = await self._letters(group)
        shown = {message.id: self._compare_letter(message, letters) for message in messages}
        came = await self._receive_letters(group, shown.keys())
        held: list[Held] = []
        for message in messages:
            letter, delivery = shown[message.id], came.get(message.id)
            if letter is None:
                continue
            if delivery is None:
                message.lose("place", "dead", "not handed out")
                continue
            message.compare("received count", letter.delivery_count, delivery.delivery_count)
            message.compare("death", death_of(letter), delivery.death)
            message.expected.lock()
            message.compare_sent(delivery)
            held.append((message, delivery, message.steps.pop(0)[1]))
        return held

    async def _receive_letters(self, group: Group, wanted: Set[str]) -> dict[str, Delivery]:
        """Receive the dead letters that come, by id."""
        came: dict[str, Delivery] = {}

        async def have_come() -> bool:
            claim = await self._broker.receive(dead_letters_of(group.name), LIMIT, self._lock)
            came.update({one.id: one for one in claim.deliveries})
            return wanted <= came.keys()

        await self._wait(have_come)
        return came

    async def _look_at_letters(self, group: Group) -> None:
        """Receive the dead letters again: those of an abandoned delay don't come yet."""
        if group.life != "dead" or not all(
            len(message.steps) == 1 for message in group.messages if not message.is_lost
        ):
            return
        back = {
            message.id
            for message in group.messages
            if message.case.end not in ("lock ends", "complete") and not message.is_lost
            if message.expected.due_at <= self._now
        }
        came = await self._receive_letters(group, back)
        for message in group.messages:
            if not message.is_lost:
                is_back = message.id in back
                message.compare("due", is_back, message.id in came)

    async def _finish(self, group: Group) -> None:
        """Compare what is left: nothing but dead letters."""
        for delivery in await self._claim(group):
            group.by_id[delivery.id].lose("place", group.by_id[delivery.id].expected.place, "ready")
        letters = await self._letters(group)
        for message in group.messages:
            self._compare_letter(message, letters)
        if not any(message.is_lost for message in group.messages):
            await expect_stats(self._broker, self._harness, group.name, Stats(dead=len(letters)))
        if group.life == "dead":
            dead = {message.id for message in group.messages if message.expected.place == "dead"}
            came = await self._receive_letters(group, dead)
            for message in group.messages:
                if not message.is_lost:
                    message.compare("due", message.id in dead, message.id in came)


def verdict_of(end: str, lock: float) -> Verdict:
    """Return the verdict of this name, with its delay in seconds."""
    ending = ENDINGS[end]
    assert ending != LOCK_ENDED
    return replace(ending, delay=ending.delay * lock) if isinstance(ending, Abandon) else ending


def death_of(letter: DeadMessage) -> Death:
    """Return why a dead letter died, as it should be handed out with it."""
    return Death(letter.reason, letter.description, letter.dead_at, letter.error, letter.history)
