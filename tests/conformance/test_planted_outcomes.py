"""The table of how deliveries end must find bugs that are planted; and what a harness declares must happen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenure._backends.memory import MemoryBroker
from tenure._backends.memory.messages import NEVER, StoredMessage, Subqueue
from tenure._queue.delivery_ends import LOCK_ENDED, TIME_IS_OVER, Cause, Ending, Outcome
from tenure._queue.message import EXPIRED, Attempt
from tenure._queue.verdicts import Abandon, DeadLetter, GiveBack
from tenure.testing._conformance.queues.outcomes import OutcomeTests
from tenure.testing.conformance import Deviation
from tests.conformance.planted import failing_tests, queues_with
from tests.stores.memory.test_suites import MemoryQueueHarness


class ExpiresBeforeItsLastDeliveryCounts(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        is_rejected = bool(message.history) and message.history[-1].outcome == "rejected"
        super()._dead_letter(subqueue, message, cause if is_rejected or message.expires_at > now else TIME_IS_OVER, now)


class LosesTheAttemptOfACrash(MemoryBroker):
    def _record_attempt(self, message: StoredMessage, attempt: Attempt) -> None:
        if attempt.outcome != "expired":
            super()._record_attempt(message, attempt)


class CountsWhatIsGivenBack(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        message.delivery_count += isinstance(ending, GiveBack)
        return super()._end(subqueue, message, ending, now)


class CountsWhatIsReleased(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        message.delivery_count += isinstance(ending, GiveBack) and message.session is not None
        return super()._end(subqueue, message, ending, now)


class NotesWhatIsGivenBack(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if isinstance(ending, GiveBack) and message.death is None:
            self._record_attempt(message, Attempt(message.delivery_count, now + self._wall_offset, "abandoned"))
        return super()._end(subqueue, message, ending, now)


class AbandonedIsExpired(MemoryBroker):
    def _record_attempt(self, message: StoredMessage, attempt: Attempt) -> None:
        is_bare = attempt.outcome == "abandoned" and attempt.error is None
        super()._record_attempt(message, replace(attempt, outcome="expired") if is_bare else attempt)


class KeepsTheMomentOfTheFirstDeath(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        before = message.death
        super()._dead_letter(subqueue, message, cause, now)
        if before is not None and message.death is not None:
            message.death = replace(message.death, at=before.at)


class NotesNoSecondReason(MemoryBroker):
    def _record_attempt(self, message: StoredMessage, attempt: Attempt) -> None:
        if message.death is None:
            super()._record_attempt(message, attempt)


class NumbersTheNeverReceivedZero(MemoryBroker):
    def _record_attempt(self, message: StoredMessage, attempt: Attempt) -> None:
        super()._record_attempt(message, replace(attempt, number=message.delivery_count))


class CountsTheReceiptOfADeadLetter(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        message.delivery_count += message.death is not None and ending == LOCK_ENDED
        return super()._end(subqueue, message, ending, now)


class DelaysNoDeadLetter(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if message.death is not None and isinstance(ending, Abandon):
            ending = replace(ending, delay=0.0)
        return super()._end(subqueue, message, ending, now)


class ExpiresWhatWasDeferred(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        message.is_deferred = message.is_deferred and message.expires_at > now
        return super()._end(subqueue, message, ending, now)


class ForgetsEarlierErrors(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        super()._dead_letter(subqueue, message, cause, now)
        if message.death is not None and message.history:
            message.death = replace(message.death, error=message.history[-1].error)


class ForgetsTheFormerLife(MemoryBroker):
    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        if message.history and message.history[-1].outcome == "rejected" and message.death is None:
            message.history = ()
        super()._schedule(subqueue, message, visible_at, now)


class RejectsWithAnotherReason(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if isinstance(ending, DeadLetter) and message.expires_at <= now:
            ending = replace(ending, reason=EXPIRED)
        return super()._end(subqueue, message, ending, now)


class ForgetsToExpireAfterADelay(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        outcome = super()._end(subqueue, message, ending, now)
        if outcome.place == "delayed":
            message.expires_at = NEVER
        return outcome


PLANTED: list[type[MemoryBroker]] = [
    ExpiresBeforeItsLastDeliveryCounts,
    LosesTheAttemptOfACrash,
    CountsWhatIsGivenBack,
    CountsWhatIsReleased,
    NotesWhatIsGivenBack,
    AbandonedIsExpired,
    KeepsTheMomentOfTheFirstDeath,
    NotesNoSecondReason,
    NumbersTheNeverReceivedZero,
    CountsTheReceiptOfADeadLetter,
    DelaysNoDeadLetter,
    ExpiresWhatWasDeferred,
    ForgetsEarlierErrors,
    ForgetsTheFormerLife,
    RejectsWithAnotherReason,
    ForgetsToExpireAfterADelay,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: type[MemoryBroker]) -> None:
    assert failing_tests(queues_with(plant), OutcomeTests, failures=(AssertionError,))


# --- deviations ---


def declaring(plant: type[MemoryBroker], *declared: Deviation) -> type[MemoryQueueHarness]:
    """Return a harness whose brokers are *plant*, and which declares how they differ."""

    class Declaring(queues_with(plant)):  # type: ignore[misc]
        deviations = declared

    return Declaring


SECOND = Deviation("no second attempt", "it has no place for one", ("history", "error"), r"^dead .* reject")


def test_what_is_declared_may_differ() -> None:
    assert not failing_tests(declaring(NotesNoSecondReason, SECOND), OutcomeTests)


@pytest.mark.parametrize(
    "declared",
    [replace(SECOND, fields=("history",)), replace(SECOND, cases=r"^dead .* reject$")],
    ids=["another field", "another case"],
)
def test_what_is_not_declared_may_not(declared: Deviation) -> None:
    assert failing_tests(declaring(NotesNoSecondReason, declared), OutcomeTests)


def test_what_is_declared_and_does_not_happen_fails() -> None:
    assert failing_tests(declaring(MemoryBroker, SECOND), OutcomeTests)
    assert not failing_tests(declaring(MemoryBroker), OutcomeTests)
