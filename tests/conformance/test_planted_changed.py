"""The suites must find brokers that don't tell when others have deleted a queue, or made it anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tenure._backends.memory import MemoryBroker
from tenure._backends.memory.messages import StoredQueue
from tenure._queue.broker import QueueOptions, QueueSettings
from tenure._queue.generations import Generations
from tenure.testing._conformance.queues.changed import ChangeTests
from tests.conformance.planted import failing_tests, queues_with


class _Silent(Generations):
    def note(self, queue: str, mark: object) -> None:
        pass


class TellsNothing(MemoryBroker):
    def __init__(self, *inside: Any) -> None:
        super().__init__(*inside)
        self.generations = _Silent()


class TellsOnlyThatItIsGone(MemoryBroker):
    def _note_generation(self, name: str) -> None:
        self.generations.note(name, name in self._memory.queues)


class TellsSendersOnly(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Any:
        noting, self.generations = self.generations, _Silent()
        try:
            return await super().receive(queue, limit, lock)
        finally:
            self.generations = noting


class TellsReceiversOnly(MemoryBroker):
    def _send(self, *values: Any) -> list[str]:
        self._is_sending = True
        return super()._send(*values)

    def _note_generation(self, name: str) -> None:
        if not self.__dict__.pop("_is_sending", False):
            super()._note_generation(name)


class TakesAChangeForANewQueue(MemoryBroker):
    def _note_generation(self, name: str) -> None:
        stored = self._memory.queues.get(name)
        self.generations.note(name, None if stored is None else (stored.generation, stored.settings))


class TellsAnotherMarkWhenItDeclares(MemoryBroker):
    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        holds = await super().declare(queue, changes, only_undeclared=only_undeclared)
        self.generations.note(queue, object())
        return holds


BUGS: list[tuple[type[MemoryBroker], str]] = [
    (TellsNothing, "test_a_deleted_queue_gets_its_settings_again"),
    (TellsNothing, "test_a_program_is_told_of_other_settings_in_a_queue_made_anew"),
    (TellsNothing, "test_a_deletion_while_a_receiver_waits"),
    (TellsNothing, "test_a_deletion_while_a_consumer_waits"),
    (TellsNothing, "test_a_deletion_while_a_message_is_in_hand"),
    (TellsNothing, "test_two_programs_with_one_expectation_both_go_on"),
    (TellsNothing, "test_no_claim_of_a_queue_made_anew_exceeds_the_expected_limits"),
    (TellsOnlyThatItIsGone, "test_a_queue_made_anew_by_a_sender_gets_its_settings_again"),
    (TellsSendersOnly, "test_a_deleted_queue_gets_its_settings_again"),
    (TellsReceiversOnly, "test_a_queue_made_anew_by_a_sender_gets_its_settings_again"),
    (TakesAChangeForANewQueue, "test_a_change_by_others_is_no_new_queue"),
    (TellsAnotherMarkWhenItDeclares, "test_nothing_is_declared_again_while_nothing_changes"),
]


@pytest.mark.parametrize(("plant", "finder"), BUGS)
def test_a_planted_broker_is_found(plant: type[MemoryBroker], finder: str) -> None:
    assert failing_tests(queues_with(plant), ChangeTests, is_meant=lambda test: test == finder, in_real_time=True)


def forgets_all(queue: StoredQueue) -> None:
    queue.settings = QueueSettings()
    queue.declared.clear()


def forgets_one(queue: StoredQueue) -> None:
    queue.settings = replace(queue.settings, max_deliveries=10)
    queue.declared.discard("max_deliveries")


@pytest.mark.parametrize("remove", [forgets_all, forgets_one])
def test_a_planted_removal_that_no_answer_shows_is_found(remove: Callable[[StoredQueue], None]) -> None:
    class Edited(queues_with(MemoryBroker)):  # type: ignore[misc]
        edits = ("forget",)

        async def edit(self, queue: str, how: str) -> None:
            remove(self._memory.queues[queue])

    finder = "test_an_edit_by_an_administrator_is_repaired"
    assert failing_tests(Edited, ChangeTests, is_meant=lambda test: test == finder, in_real_time=True)
