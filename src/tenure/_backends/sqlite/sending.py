"""Operations of senders: make a queue, declare its settings, send to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tenure._backends.sqlite.queue_reader import Queue
from tenure._backends.sqlite.rows import (
    columns_of,
    headers_column,
    limits_of,
    plain_text,
)
from tenure._backends.sqlite.statements import statements
from tenure._backends.sqlite.transitions import Transitions
from tenure._queue.broker import LIMITS, Advanced, QueueOptions, QueueSettings, undeclared
from tenure._queue.checks import DEAD_SUFFIX, INT_MAX
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import NO_HEADERS
from tenure._queue.outgoing import Outgoing
from tenure.errors import ConfigError

FORGET_MAX = 100
"""The most ids, and logs of sessions, that a claim deletes that finds no message."""

_SQL = statements("queue.sql")


class Sending(Transitions):
    """The operations of senders."""

    def open(self, name: str) -> Queue:
        """Return the queue called *name*; create it at its first use."""
        queue = self.find(name)
        if queue is None:
            (newest,) = self._run(_SQL["newest_queue"]).fetchone()
            unset = columns_of(QueueSettings())
            self._run(_SQL["create_queue"], (newest + 1, name, *unset))
            self._run(_SQL["create_queue"], (newest + 2, dead_letters_of(name), *unset))
            queue = self.find(name)
            assert queue is not None
            assert not queue.is_dead
        return queue

    def declare(self, name: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Apply *changes* to the settings of a queue; return the settings after that."""
        queue = self.open(name)
        if only_undeclared:
            changes = undeclared(changes, self.declared(name))
        self._run_many(_SQL["note_declared"], [(queue.number, setting) for setting in changes])
        settings = replace(self.settings(name), **changes)
        self._run(_SQL["declare"], (*columns_of(settings), name))
        if "dead_retention" in changes:
            self._run(_SQL["set_retention"], (queue.number, settings.dead_retention))
        if not LIMITS.isdisjoint(changes):
            self._declare_limits(queue, settings)
        queue.max_deliveries, queue.dedupe_window = settings.max_deliveries, settings.dedupe_window
        return settings

    def _declare_limits(self, queue: Queue, settings: QueueSettings) -> None:
        queue.is_limited, queue.has_max_locked = settings.is_limited, settings.max_locked < math.inf
        if queue.is_limited:
            self._run(_SQL["set_limits"], (queue.number, *limits_of(settings)))
        else:
            self._run(_SQL["clear_limits"], (queue.number,))
        self.changed[queue.name] = None

    def send(self, name: str, messages: Sequence[Outgoing], *, needs_reserve: bool = True) -> list[str]:
        """Store *messages*; return their ids. With *needs_reserve*, only if the disk keeps its reserve."""
        if needs_reserve:
            self.needs_reserve = True
        queue = self.open(name)
        prefix, sequence, delayed = self._prefix, self._newest, queue.delayed
        add_plain = self._plain.setdefault(queue.number, []).extend
        ids = []
        for message in messages:
            named = message.id
            if named is not None and not self._is_new_id(queue, named):
                ids.append(named)
                continue
            sequence += 1
            ids.append(named or f"{prefix}{sequence}")
            if _is_plain(message):
                add_plain((sequence, message.body))
            else:
                self._add(queue, sequence, message)
        if sequence != self._newest:
            if sequence > INT_MAX:
                raise ConfigError(
                    f"the sequence in tenure_queue_clock ({self._newest}) can't rise any more; set it to the highest "
                    "sequence in tenure_message"
                )
            queue.ready += sequence - self._newest - (queue.delayed - delayed)
            self._newest = sequence
            self.changed[name] = None
        return ids

    def advance(
        self,
        name: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing],
        not_before: float,
    ) -> Advanced:
        """Keep *record* of a schedule in place of *expected*, and send *messages*."""
        wall = self._at.wall
        found = self.find(name)
        row = None if found is None else self._run(_SQL["schedule"], (found.number, schedule)).fetchone()
        kept = None if row is None else plain_text(row[0])
        if kept != expected or wall < not_before:
            return Advanced(False, kept, wall)
        queue = self.open(name)
        if record is not None:
            self._run(_SQL["set_schedule"], (queue.number, schedule, record))
        else:
            self._run(_SQL["delete_schedule"], (queue.number, schedule))
        if messages:
            self.send(name, messages)
        return Advanced(True, record, wall)

    def _add(self, queue: Queue, sequence: int, message: Outgoing) -> None:
        """Prepare a message that has more than a body."""
        number, wall = queue.number, self._at.wall
        due_at = self._due_at(message)
        expires_at = None if message.expires_in is None else wall + message.expires_in
        self._messages.append(
            (
                sequence,
                number,
                wall,
                message.priority,
                message.id,
                headers_column(message),
                message.session,
                due_at,
                expires_at,
                message.reply_to,
                message.correlation_id,
                message.body,
            )
        )
        if due_at is not None:
            queue.delayed += 1
            self._run(_SQL["insert_delayed"], (number, due_at, sequence, None))
        elif message.session is not None:
            self._touched[number, message.session] = None
        if expires_at is not None:
            self._run(_SQL["insert_expiry"], (number, expires_at, sequence))

    def _due_at(self, message: Outgoing) -> float | None:
        if message.at is not None:
            assert isinstance(message.at, (int, float))
            return message.at if message.at > self._at.wall else None
        return self._at.wall + message.delay if message.delay else None

    def _is_new_id(self, queue: Queue, name: str) -> bool:
        """Whether no message was sent with this id in the window; note that one was now."""
        since = self._at.wall - queue.dedupe_window
        # Two are deleted for each that is added: so the table doesn't grow for ever, and no sweep is needed.
        self._run(_SQL["delete_old_sent_ids"], (queue.number, since, 2))
        if not queue.dedupe_window:
            return True
        return self._run(_SQL["remember_sent_id"], (queue.number, name, self._at.wall, since)).rowcount > 0

    def _delete_old_ids(self, queue: Queue) -> None:
        """Delete outdated ids, of this queue and of a random one, which may have no senders and receivers any more."""
        other = self._run(_SQL["any_queue"]).fetchone()
        for number in {queue.number & ~1, *(other or ())}:
            one = self._numbered(number)
            self._run(_SQL["delete_old_sent_ids"], (number, self._at.wall - one.dedupe_window, FORGET_MAX))
            self._run(_SQL["delete_old_handled_ids"], (number, self._at.wall, FORGET_MAX))
            rate = self.settings(one.name).session_rate if one.is_limited else math.inf
            over = self._at.wall - rate[1] if isinstance(rate, tuple) else self._at.wall
            self._run(_SQL["delete_old_deliveries"], (number, over, FORGET_MAX))

    def remember(self, name: str, id_: str, seconds: float) -> None:
        """Add *id_* to the inbox of a queue."""
        queue = self.open(name.removesuffix(DEAD_SUFFIX))
        self._run(_SQL["delete_old_handled_ids"], (queue.number, self._at.wall, 4))
        self._run(_SQL["remember_handled_id"], (queue.number, id_, self._at.wall + seconds))


def _is_plain(message: Outgoing) -> bool:
    """Whether a message has only a body, as most have; that is faster to write."""
    return (
        message.headers is NO_HEADERS
        and not message.delay
        and not message.priority
        and message.id is None
        and message.at is None
        and message.expires_in is None
        and message.session is None
        and message.reply_to is None
        and message.correlation_id is None
    )
