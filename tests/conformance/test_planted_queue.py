"""The suites of brokers must find bugs that are planted: a check that can't fail proves nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tenure._backends.memory.messages import (
    MessageState,
    RememberedIds,
    Session,
    StoredMessage,
    StoredQueue,
    Subqueue,
)
from tenure._backends.memory.queue import MemoryBroker
from tenure._queue.broker import Advanced, Claim, NoSession, QueueOptions, QueueSettings, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.delivery_ends import Cause, Ending, Outcome
from tenure._queue.limits import UNLIMITED, Allowance, allowance_of
from tenure._queue.message import EXPIRED, Delivery, Died, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    SETTLED,
    Abandon,
    Complete,
    Deleted,
    GiveBack,
    Lapsed,
    NotEmpty,
    Renewed,
    Settled,
    Settlement,
)
from tenure._runtime.notifier import Notifier
from tenure.testing.conformance import BrokerFaultSuite, BrokerSuite
from tests.conformance.planted import failing_tests, queues_with


class ComparesSequenceOnly(MemoryBroker):
    def _locked(self, delivery: Delivery, now: float) -> tuple[Subqueue, StoredMessage] | None:
        subqueue = self._subqueue(delivery.queue, now)
        message = subqueue.messages.get(delivery.sequence) if subqueue else None
        return (subqueue, message) if subqueue and message and message.state is MessageState.LOCKED else None


class LateVerdictsStand(MemoryBroker):
    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        token = message.token
        super()._lock_expired(subqueue, message, now)
        message.token = token

    def _locked(self, delivery: Delivery, now: float) -> tuple[Subqueue, StoredMessage] | None:
        subqueue = self._subqueue(delivery.queue, now)
        message = subqueue.messages.get(delivery.sequence) if subqueue else None
        return (
            (subqueue, message)
            if subqueue and message and message.token == delivery.token and message.death is None
            else None
        )


class AlwaysSettled(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        return [SETTLED if one == LAPSED else one for one in await super().settle(settlements)]


class SettlesTheFirstOnly(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        return [*await super().settle(settlements[:1]), *([SETTLED] * (len(settlements) - 1))]


class NoExpiry(MemoryBroker):
    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        pass


class EarlyExpiry(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        return await super().receive(queue, limit, lock * 0.5)


class RenewsNothing(MemoryBroker):
    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> bool:
        return self._locked(one, now) is not None if isinstance(one, Delivery) else self._session(one, now) is not None


class RenewsInAnyOrder(MemoryBroker):
    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        return list(reversed(await super().renew(held, lock)))


class CountsWhenSettled(MemoryBroker):
    def _lock(
        self, subqueue: Subqueue, messages: list[StoredMessage], until: float, token: int = 0
    ) -> Sequence[Delivery]:
        deliveries = super()._lock(subqueue, messages, until, token)
        for message in messages:
            message.delivery_count -= 1
        return deliveries


class CountsReturnedMessages(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        return super()._end(subqueue, message, Abandon() if isinstance(ending, GiveBack) else ending, now)


class OneTryTooMany(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        skipped = isinstance(ending, Abandon)
        message.delivery_count -= skipped
        outcome = super()._end(subqueue, message, ending, now)
        message.delivery_count += skipped
        return outcome


class ReportsNoExpiry(MemoryBroker):
    def _record_death(self, subqueue: Subqueue, message: StoredMessage) -> None:
        if message.death is not None and message.death.reason != EXPIRED:
            super()._record_death(subqueue, message)


class ReportsDeathsTwice(MemoryBroker):
    _again: Sequence[Died] = ()

    def _take_deaths(self, subqueue: Subqueue) -> Sequence[Died]:
        reported = super()._take_deaths(subqueue)
        self._again, again = reported, self._again
        return reported or again


class ReportsDeathsToEachProcess(MemoryBroker):
    _reported = 0

    def _take_deaths(self, subqueue: Subqueue) -> Sequence[Died]:
        reported = tuple(self._memory.queues[subqueue.name.removesuffix(DEAD_SUFFIX)].deaths)[self._reported :]
        self._reported += len(reported)
        return () if subqueue.is_dead else reported


class ForgetsDeathsWhereNoSessionIs(MemoryBroker):
    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        answer = await super().accept(queue, session, lock)
        return NoSession(answer.due_in) if isinstance(answer, NoSession) else answer


class DropsTheDead(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        self._set_state(subqueue, message, MessageState.GONE)


class ForgetsReasons(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        super()._dead_letter(subqueue, message, cause._replace(reason="dead"), now)


class ForgetsHistory(MemoryBroker):
    def _record_attempt(self, message: StoredMessage, *rest: object) -> None:
        pass


class IgnoresDelays(MemoryBroker):
    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        super()._schedule(subqueue, message, min(visible_at, now), now)


class IgnoresIds(MemoryBroker):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        ids: list[str] = []
        for message in messages:
            self._queue(queue).sent = RememberedIds()
            ids += await super().send(queue, [message])
        return ids


class RemembersIdsForEver(MemoryBroker):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        for one in messages:
            if one.id is not None and self._queue(queue).sent.knows(one.id, -1e12):
                self._queue(queue).sent.note(one.id, 1e12)
        return await super().send(queue, messages)


class TakesAnExpiredBacklogForTheEnd(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        dead = self._queue(queue).dead.messages
        before = len(dead)
        claim = await super().receive(queue, limit, lock)
        if before == len(dead):
            return claim
        await super().settle([Settlement(one, GIVE_BACK) for one in claim.deliveries])
        return Claim(())


class MixesQueues(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        return claim if claim.deliveries else await super().receive(queue.lower(), limit, lock)


class LastInFirstOut(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        return Claim(list(reversed(claim.deliveries)), claim.due_in)


class GivesTooMany(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        return await super().receive(queue, limit + 1, lock)


class OneTokenForAll(MemoryBroker):
    def _new_token(self) -> int:
        return 1


class RoughStats(MemoryBroker):
    async def stats(self, queue: str) -> Stats:
        stats = await super().stats(queue)
        return Stats(stats.ready + stats.delayed, stats.locked, 0, stats.deferred, stats.dead, stats.oldest_age)


class PurgesLockedMessages(MemoryBroker):
    def _select_dead(
        self, name: str, which: Selection, limit: int | None, *, locked: bool = False
    ) -> list[StoredMessage]:
        return super()._select_dead(name, which, limit, locked=True)


class CompletesWithoutSending(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        plain = [
            Settlement(one, COMPLETE if isinstance(verdict, Complete) else verdict) for one, verdict in settlements
        ]
        return await super().settle(plain)


class CompletesDeadLettersWithoutSending(MemoryBroker):
    def _complete(self, subqueue: Subqueue, message: StoredMessage, verdict: Complete, now: float) -> Iterable[str]:
        return super()._complete(subqueue, message, replace(verdict, sends=()) if subqueue.is_dead else verdict, now)


class CompletesDeadLettersWithoutRemembering(MemoryBroker):
    def _complete(self, subqueue: Subqueue, message: StoredMessage, verdict: Complete, now: float) -> Iterable[str]:
        kept = replace(verdict, remember=0.0) if subqueue.is_dead else verdict
        return super()._complete(subqueue, message, kept, now)


class SharesSessions(MemoryBroker):
    def _new_token(self) -> int:
        for home in self._memory.queues.values():
            for session in home.live.sessions.values():
                session.token = 0
        return super()._new_token()


class SessionsLoseTheirState(MemoryBroker):
    async def release(self, held: SessionLock) -> Settled | Lapsed:
        await super().write_state(held, None)
        return await super().release(held)


class OvertakesInSessions(MemoryBroker):
    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        super()._schedule(subqueue, message, visible_at, now)
        if message.session is not None:
            message.session.retrying.clear()


class RedrivesToTheSameQueue(MemoryBroker):
    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        return await super().redrive(queue, which, limit, dry_run=dry_run)


class RedrivesUnderNewIds(MemoryBroker):
    def _insert_redriven(self, queue: StoredQueue, message: StoredMessage, now: float) -> None:
        message.id = f"{message.id}-again"
        super()._insert_redriven(queue, message, now)


class RedrivesOnlyUnknownIds(MemoryBroker):
    def _insert_redriven(self, queue: StoredQueue, message: StoredMessage, now: float) -> None:
        if not queue.sent.knows(message.id, now):
            super()._insert_redriven(queue, message, now)


class RedrivesWithoutHistory(MemoryBroker):
    def _insert_redriven(self, queue: StoredQueue, message: StoredMessage, now: float) -> None:
        message.history = ()
        super()._insert_redriven(queue, message, now)


class GivesNoHints(MemoryBroker):
    def hints(self, queue: str) -> AsyncIterator[None]:
        return Notifier().listen(queue)


class AdvancesWhateverIsKept(MemoryBroker):
    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        expected = (await self.schedules(queue)).records.get(schedule)
        return await super().advance(queue, schedule, expected, record, messages, not_before)


class SendsSlotsBeforeItCompares(MemoryBroker):
    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        await self.send(queue, messages)
        return await super().advance(queue, schedule, expected, record, (), not_before)


class SendsNoSlots(MemoryBroker):
    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        return await super().advance(queue, schedule, expected, record, (), not_before)


class AdvancesTooEarly(MemoryBroker):
    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        return await super().advance(queue, schedule, expected, record, messages)


class ForgetsOtherSchedules(MemoryBroker):
    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        answer = await super().advance(queue, schedule, expected, record, messages, not_before)
        kept = self._queue(queue).schedules
        for other in [one for one in kept if one != schedule]:
            del kept[other]
        return answer


class StripsRecords(MemoryBroker):
    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        stripped = None if record is None else record.strip()
        return await super().advance(queue, schedule, expected, stripped, messages, not_before)


class SchedulesOutliveTheirQueue(MemoryBroker):
    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        kept = (await self.schedules(queue)).records
        answer = await super().delete(queue, force=force)
        if kept and isinstance(answer, Deleted):
            self._queue(queue).schedules.update(kept)
        return answer


# --- limits ---


class LimitsNothing(MemoryBroker):
    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        return UNLIMITED


class LimitsEachClaim(MemoryBroker):
    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        stored = self._queue(subqueue.name)
        return UNLIMITED if subqueue.is_dead else allowance_of(stored.settings, 0, stored.delivered, now)


class KeepsThePlacesOfTheDead(MemoryBroker):
    _taken = 0

    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        stored = self._queue(subqueue.name)
        return UNLIMITED if subqueue.is_dead else allowance_of(stored.settings, self._taken, stored.delivered, now)

    def _lock(
        self, subqueue: Subqueue, messages: list[StoredMessage], until: float, token: int = 0
    ) -> Sequence[Delivery]:
        self._taken += 0 if subqueue.is_dead else len(messages)
        return super()._lock(subqueue, messages, until, token)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        answers = await super().settle(settlements)
        self._taken -= sum(isinstance(answer, Settled) for answer in answers)
        return answers


class LimitsDeadLetters(MemoryBroker):
    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        stored = self._queue(subqueue.name.removesuffix(DEAD_SUFFIX))
        return allowance_of(stored.settings, subqueue.count[MessageState.LOCKED], stored.delivered, now)


class RefundsTheRate(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        self._queue(subqueue.name.removesuffix(DEAD_SUFFIX)).delivered.clear()
        return super()._end(subqueue, message, ending, now)


class CountsNoSessions(MemoryBroker):
    def _note_delivered(self, subqueue: Subqueue, count: int, now: float, session: str | None = None) -> None:
        if session is None:
            super()._note_delivered(subqueue, count, now)


class CountsAllSessionsTogether(MemoryBroker):
    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        logs = self._queue(held.queue).delivered_in
        for other in list(logs.values()):
            logs.setdefault(held.session, other)
        return await super().receive_session(held, limit)


class AcceptsWhatIsHeldUp(MemoryBroker):
    def _hold_up(self, subqueue: Subqueue, session: Session, seconds: float, now: float) -> None:
        pass


class HoldsUpForEver(MemoryBroker):
    def _hold_up(self, subqueue: Subqueue, session: Session, seconds: float, now: float) -> None:
        super()._hold_up(subqueue, session, 1e9, now)


class OvertakesWhatIsHeldUp(MemoryBroker):
    def _hold_up(self, subqueue: Subqueue, session: Session, seconds: float, now: float) -> None:
        super()._hold_up(subqueue, session, seconds, now)
        session.retrying.clear()


class GivesNoHintOfAFreePlace(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        for delivery, _ in settlements:
            self._queue(delivery.queue.removesuffix(DEAD_SUFFIX)).live.has_max_locked = False
        return await super().settle(settlements)


class GivesNoHintOfAResumption(MemoryBroker):
    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        notify, self._notify = self._notify, lambda name: None  # type: ignore[method-assign]
        try:
            return await super().declare(queue, changes, only_undeclared=only_undeclared)
        finally:
            self._notify = notify  # type: ignore[method-assign]


class TellsNotOfHeldBack(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        return (await super().receive(queue, limit, lock))._replace(is_held_back=False)


class TellsAlwaysOfHeldBack(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        return claim._replace(is_held_back=claim.is_limited)


class TellsNotOfLimits(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        return (await super().receive(queue, limit, lock))._replace(is_limited=False)


class TellsNotWhenTheRateIsFree(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        return claim._replace(due_in=None) if claim.is_held_back else claim


class PausesTheSenders(MemoryBroker):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        if (await self.settings(queue)).paused:
            return [one.id or "" for one in messages]
        return await super().send(queue, messages)


class AcceptsOfAPausedQueue(MemoryBroker):
    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        stored = self._queue(queue)
        settings = stored.settings
        stored.settings = replace(settings, paused=False)
        answer = await super().accept(queue, session, lock)
        stored.settings = settings
        return answer


class ShowsNoPause(MemoryBroker):
    async def stats(self, queue: str) -> Stats:
        return replace(await super().stats(queue), paused=False)


class RemembersTheRateOfADeletedQueue(MemoryBroker):
    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        before = self._queue(queue).delivered
        answer = await super().delete(queue, force=force)
        self._queue(queue).delivered = before
        return answer


class TakesTheMessageWithItsHint(MemoryBroker):
    """Keeps it for the next claim, and until its lock ends."""

    taken: Claim | None = None

    def hints(self, queue: str) -> AsyncIterator[None]:
        return self._with_message(queue, super().hints(queue))

    async def _with_message(self, queue: str, hints: AsyncIterator[None]) -> AsyncIterator[None]:
        async for _ in hints:
            self.taken = await super().receive(queue, 1, 30.0)
            yield

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        taken, self.taken = self.taken, None
        return taken if taken and taken.deliveries else await super().receive(queue, limit, lock)


class CountsTheMessageThatItPutsBack(TakesTheMessageWithItsHint):
    """Puts it back when it is the only one that asks, counted."""

    async def _with_message(self, queue: str, hints: AsyncIterator[None]) -> AsyncIterator[None]:
        async for _ in hints:
            claim = await MemoryBroker.receive(self, queue, 1, 30.0)
            await self.settle([Settlement(one, Abandon()) for one in claim.deliveries])
            yield


class HandsOutTwiceWhatWasReady(MemoryBroker):
    """Once for each time that it was noted as ready."""

    is_redriven = False

    async def redrive(self, *arguments: Any, **options: Any) -> int:
        self.is_redriven = True
        return await super().redrive(*arguments, **options)

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        return claim._replace(deliveries=[*claim.deliveries] * (1 + self.is_redriven))

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        claim = await super().receive_session(held, limit)
        return claim._replace(deliveries=[*claim.deliveries] * 2) if isinstance(claim, Claim) else claim


PLANTED: dict[type[MemoryBroker], str] = {
    ComparesSequenceOnly: "test_a_late_verdict_touches_no_newer_lock",
    LateVerdictsStand: "test_a_late_verdict_lapses",
    AlwaysSettled: "test_a_delivery_is_settled_once",
    SettlesTheFirstOnly: "test_verdicts_are_answered_in_order_each_by_itself",
    NoExpiry: "test_when_a_lock_ends_the_message_is_claimable",
    EarlyExpiry: "test_a_renewed_lock_is_kept",
    RenewsNothing: "test_a_renewed_lock_is_kept",
    RenewsInAnyOrder: "test_many_are_renewed_each_with_its_own_answer",
    CountsWhenSettled: "test_a_delivery_counts_when_it_is_claimed",
    CountsReturnedMessages: "test_giving_back_does_not_count",
    OneTryTooMany: "test_a_message_abandoned_at_its_last_delivery_is_dead",
    ReportsNoExpiry: "test_an_expiry_under_a_lock_is_reported_once",
    ReportsDeathsTwice: "test_a_claim_reports_each_death_by_time_once",
    ReportsDeathsToEachProcess: "test_a_death_by_time_is_reported_to_one_of_two_consumers",
    ForgetsDeathsWhereNoSessionIs: "test_no_session_of_a_paused_queue_is_accepted",
    DropsTheDead: "test_a_message_whose_last_lock_expires_is_dead",
    ForgetsReasons: "test_a_rejected_message_keeps_its_reason",
    ForgetsHistory: "test_a_rejected_message_keeps_its_reason",
    IgnoresDelays: "test_a_delayed_message_comes_later",
    IgnoresIds: "test_an_id_is_kept_once",
    RemembersIdsForEver: "test_an_id_is_kept_once",
    TakesAnExpiredBacklogForTheEnd: "test_an_expired_backlog_in_front_is_not_the_end_of_a_queue",
    MixesQueues: "test_queues_do_not_mix",
    LastInFirstOut: "test_order_is_that_of_sending",
    GivesTooMany: "test_no_more_than_asked_for",
    OneTokenForAll: "test_a_claim_has_a_token_of_its_own",
    RoughStats: "test_a_delayed_message_comes_later",
    PurgesLockedMessages: "test_redrive_and_purge_take_the_selected_dead_letters",
    CompletesWithoutSending: "test_complete_sends_and_remembers",
    CompletesDeadLettersWithoutSending: "test_complete_sends_and_remembers_for_a_dead_letter_too",
    CompletesDeadLettersWithoutRemembering: "test_complete_sends_and_remembers_for_a_dead_letter_too",
    SharesSessions: "test_messages_of_sessions_come_only_to_their_holder",
    SessionsLoseTheirState: "test_a_session_keeps_its_state",
    OvertakesInSessions: "test_a_session_is_in_order_through_failures",
    RedrivesToTheSameQueue: "test_redrive_to_another_queue",
    RedrivesUnderNewIds: "test_redrive_to_another_queue",
    RedrivesOnlyUnknownIds: "test_redrive_to_another_queue",
    RedrivesWithoutHistory: "test_redrive_to_another_queue",
    GivesNoHints: "test_a_message_gives_a_hint",
    AdvancesWhateverIsKept: "test_what_is_kept_must_be_what_is_expected",
    SendsSlotsBeforeItCompares: "test_what_is_kept_must_be_what_is_expected",
    SendsNoSlots: "test_the_messages_are_sent_with_the_record",
    AdvancesTooEarly: "test_nothing_is_done_too_early",
    ForgetsOtherSchedules: "test_schedules_of_one_queue_do_not_hinder_each_other",
    StripsRecords: "test_a_record_may_be_any_text",
    SchedulesOutliveTheirQueue: "test_a_deleted_queue_has_no_schedules",
    LimitsNothing: "test_no_more_are_locked_at_once",
    LimitsEachClaim: "test_no_more_are_locked_at_once",
    KeepsThePlacesOfTheDead: "test_a_dead_consumer_frees_its_places_when_its_locks_end",
    LimitsDeadLetters: "test_dead_letters_have_no_limits",
    RefundsTheRate: "test_each_delivery_counts_for_a_rate",
    CountsNoSessions: "test_a_rate_of_sessions_holds_for_each_by_itself",
    CountsAllSessionsTogether: "test_a_rate_of_sessions_holds_for_each_by_itself",
    AcceptsWhatIsHeldUp: "test_messages_that_come_into_a_session_at_its_rate_wait",
    HoldsUpForEver: "test_a_session_that_is_held_up_keeps_its_order",
    OvertakesWhatIsHeldUp: "test_messages_that_come_into_a_session_at_its_rate_wait",
    GivesNoHintOfAFreePlace: "test_a_settled_message_frees_its_place_and_gives_a_hint",
    GivesNoHintOfAResumption: "test_nothing_is_received_of_a_paused_queue",
    TellsNotOfHeldBack: "test_no_more_are_locked_at_once",
    TellsAlwaysOfHeldBack: "test_nothing_is_held_back_of_an_empty_queue",
    TellsNotOfLimits: "test_nothing_is_held_back_of_an_empty_queue",
    TellsNotWhenTheRateIsFree: "test_no_more_are_received_in_the_time_of_a_rate",
    PausesTheSenders: "test_nothing_is_received_of_a_paused_queue",
    AcceptsOfAPausedQueue: "test_no_session_of_a_paused_queue_is_accepted",
    ShowsNoPause: "test_nothing_is_received_of_a_paused_queue",
    RemembersTheRateOfADeletedQueue: "test_a_deleted_queue_has_no_limits",
    HandsOutTwiceWhatWasReady: "test_a_message_that_was_ready_before_comes_once",
    TakesTheMessageWithItsHint: "test_a_hint_that_nobody_takes_up_keeps_no_message",
    CountsTheMessageThatItPutsBack: "test_a_hint_that_nobody_takes_up_keeps_no_message",
}
"""The planted bugs, each with the test that has to find it; others may find it, too."""


def findings(plant: type[MemoryBroker], is_meant: Callable[[str], bool]) -> set[str]:
    """Run the tests of the suites of brokers that are meant against *plant*; return those that fail."""
    return failing_tests(queues_with(plant), BrokerSuite, BrokerFaultSuite, is_meant=is_meant)


def test_without_a_plant_nothing_is_found() -> None:
    assert findings(MemoryBroker, lambda _: True) == set()


def test_every_plant_has_a_test_that_finds_it() -> None:
    plants = {one for one in globals().values() if isinstance(one, type) and issubclass(one, MemoryBroker)}
    assert plants - {MemoryBroker} == PLANTED.keys()


@pytest.mark.parametrize(("plant", "test"), PLANTED.items())
def test_a_planted_bug_is_found(plant: type[MemoryBroker], test: str) -> None:
    assert findings(plant, test.__eq__) == {test}
