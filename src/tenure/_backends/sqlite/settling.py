"""Operations of lock holders: renew, settle, release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tenure._backends.sqlite.queue_reader import LockGroup, Queue
from tenure._backends.sqlite.rows import (
    runs_of,
)
from tenure._backends.sqlite.sending import Sending
from tenure._backends.sqlite.statements import statements
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    SETTLED,
    Complete,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)

_SQL = statements("queue.sql")


class Settling(Sending):
    """The operations of lock holders."""

    def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> list[Renewed | Lapsed]:
        """Extend many locks to *lock* seconds from now."""
        answers: list[Renewed | Lapsed] = [LAPSED] * len(held)
        for token, places in _by_token(held).items():
            groups = self._groups(token)
            kept: dict[int, None] = {}
            for place in places:
                one = held[place]
                group = self._group_of(groups, one)
                if group is None:
                    continue
                if isinstance(one, SessionLock):
                    self._renew_group(group, lock)
                elif group.session is None:
                    kept[one.sequence] = None
                until = group.until if group.session is not None else max(group.until, self._at.now + lock)
                answers[place] = Renewed(self._at.wall + until - self._at.now)
            if kept:
                self._renew_some(groups, kept, lock)
        return answers

    def _renew_some(self, groups: list[LockGroup], kept: dict[int, None], lock: float) -> None:
        """Renew the messages *kept*: in place if they are all of their group, otherwise in a group of their own."""
        for group in groups:
            mine = [sequence for sequence in group.sequences if sequence in kept]
            if not mine:
                continue
            if len(mine) == len(group.sequences):
                self._renew_group(group, lock)
                continue
            for sequence in mine:
                del group.sequences[sequence]
            self._save_group(group)
            (newest,) = self._run(_SQL["newest_part"], (group.token,)).fetchone()
            longer = max(lock, group.until - self._at.now)
            part = replace(group, part=(newest or 0) + 1, lock=longer, sequences=dict.fromkeys(mine))
            self._insert_group(part)
            self._run(_SQL["copy_holder"], (group.part, part.token, part.part))

    def _renew_group(self, group: LockGroup, lock: float) -> None:
        group.lock = max(lock, group.until - self._at.now)  # a lock never ends sooner for being renewed
        group.until = self._at.now + group.lock
        self._run(_SQL["renew_lock_group"], (self._at.boot, group.until, group.lock, group.token, group.part))

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        """Apply many verdicts."""
        answers: list[Settled | Lapsed] = [LAPSED] * len(settlements)
        gone: dict[int, list[int]] = {}
        for token, places in _by_token([delivery for delivery, _ in settlements]).items():
            groups = self._groups(token)
            for group in groups:
                self._settle_group(group, settlements, places, answers, gone)
        for number, sequences in gone.items():
            self._remove(self._numbered(number), sequences)
        return answers

    def _settle_group(
        self,
        group: LockGroup,
        settlements: Sequence[Settlement],
        places: Iterable[int],
        answers: list[Settled | Lapsed],
        gone: dict[int, list[int]],
    ) -> None:
        """Apply the verdicts at *places* that are on messages of *group*; collect in *gone* messages to be removed."""
        name, left, removed = self._numbered(group.queue).name, group.sequences, []
        before = len(left)
        for place in places:
            delivery, verdict = settlements[place]
            sequence = delivery[1]
            if sequence not in left or delivery[0] != name:
                continue
            del left[sequence]
            if verdict is COMPLETE:
                removed.append(sequence)
                answers[place] = SETTLED
            elif isinstance(verdict, Complete):
                removed.append(sequence)
                answers[place] = SETTLED
                self._complete(delivery, verdict)
            else:
                answers[place] = self._apply(group, sequence, verdict)
        if removed:
            gone.setdefault(group.queue, []).extend(removed)
        if len(left) != before:
            self._save_group(group)
            if self._numbered(group.queue).has_max_locked:
                self.changed[name] = None  # places are free

    def _complete(self, delivery: Delivery, verdict: Complete) -> None:
        if verdict.remember:
            self.remember(delivery.queue, delivery.id, verdict.remember)
        for name, message in verdict.sends:
            self.send(name, [message], needs_reserve=False)  # it replaces the completed message

    def _remove(self, queue: Queue, sequences: list[int]) -> None:
        """Remove, for good, messages that were locked."""
        queue.locked -= len(sequences)
        runs = runs_of(sequences)
        self._run_many(_SQL["delete_messages"], runs)
        if queue.is_dead:
            self._run_many(_SQL["delete_deaths"], [(queue.number, first, last) for first, last in runs])

    def _apply(self, group: LockGroup, sequence: int, verdict: Verdict) -> Settled:
        """Apply a verdict other than ``Complete`` to a message that was removed from its group."""
        queue = self._numbered(group.queue)
        queue.locked -= 1
        return self._end(queue, group, sequence, verdict)

    def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        group = self._group_of(self._groups(held.token), held)
        if group is None:
            return LAPSED
        queue = self._numbered(group.queue)
        self._run(_SQL["delete_lock_group"], (group.token, group.part))
        queue.locked -= len(group.sequences)
        for sequence in group.sequences:
            if self._end(queue, group, sequence, GIVE_BACK).dead:
                self._report_death(queue, sequence)
        self._touched[queue.number, held.session] = None
        self.changed[queue.name] = None
        return SETTLED

    def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store a session's state."""
        self._write_sessions()  # so that it has a row
        group = self._group_of(self._groups(held.token), held)
        if group is None:
            return LAPSED
        self._run(_SQL["set_state"], (state, group.queue, held.session))
        return SETTLED


def _by_token(held: Sequence[Delivery | SessionLock]) -> dict[object, list[int]]:
    """Return the indexes of *held* by token, so that messages of one claim are looked up once."""
    found: dict[object, list[int]] = {}
    for place, one in enumerate(held):
        found.setdefault(one.token, []).append(place)
    return found
