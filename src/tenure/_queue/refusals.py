"""What a store can't do, refused before anything is written: by the broker's own traits, in the same words on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn

from tenure._queue.broker import Claim, LiveSelection, NoSession, QueueTraits
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import NO_DEFERRED_DEAD_LETTERS, Delivery, SessionLock, State
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Complete, Defer, Lapsed, Settled, Verdict
from tenure.errors import ConfigError, MessageRefused

VISIBLE_STATES: frozenset[State] = frozenset({"ready"})
"""The states of the messages that a broker shows whose trait ``peek`` is ``emulated``."""

_INSTEAD = "use a backend that can, such as postgresql:// or redis://"


def _accept(message: Outgoing) -> None:
    """Refuse nothing more."""


class Refusals:
    """The refusals of a store.

    Args:
        queues: Its queues in a sentence, such as ``queues in NATS``.
        traits: What it can do.
    """

    def __init__(self, queues: str, traits: QueueTraits) -> None:
        self._queues = queues
        self._traits = traits

    def refuse(self, feature: str) -> NoReturn:
        """Raise ``ConfigError``: there is no *feature*."""
        raise ConfigError(f"{self._queues} have no {feature}; {_INSTEAD}")

    def check_messages(self, messages: Sequence[Outgoing], check_also: Callable[[Outgoing], None] = _accept) -> None:
        """Refuse messages with a session or a priority where there are none, and those that *check_also* refuses.

        Raises:
            MessageRefused: With the index of the first such message.
        """
        for index, message in enumerate(messages):
            try:
                self.check_message(message)
                check_also(message)
            except ConfigError as error:
                raise MessageRefused(str(error), index, len(messages)) from error.__cause__

    def check_message(self, message: Outgoing) -> None:
        """Refuse one message."""
        if message.session is not None and self._traits.sessions == "impossible":
            self.refuse("sessions")
        if message.priority and self._traits.priorities == "impossible":
            self.refuse("priorities")

    def check_selection(self, which: LiveSelection) -> None:
        """Refuse to select live messages that aren't shown."""
        if which.session is not None and self._traits.sessions == "impossible":
            self.refuse("sessions")
        if which.states is not None and which.states != VISIBLE_STATES:
            unseen = ", ".join(sorted(which.states - VISIBLE_STATES)) or "none"
            raise ConfigError(
                f"{self._queues} show only messages that are ready, not those that are {unseen}; omit the states, or "
                f"{_INSTEAD}"
            )

    def check_verdict(
        self, delivery: Delivery, verdict: Verdict, check_also: Callable[[Outgoing], None] = _accept
    ) -> None:
        """Refuse to defer, and to remember ids, where that can't be done; to defer a dead letter; and what it sends."""
        if isinstance(verdict, Defer):
            if delivery.queue.endswith(DEAD_SUFFIX):
                raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
            if self._traits.deferral == "impossible":
                raise ConfigError(
                    f"{self._queues} can't defer a message, as they deliver none by its sequence; abandon it with a "
                    f"delay, or {_INSTEAD}"
                )
        if isinstance(verdict, Complete):
            if verdict.remember and self._traits.inbox == "impossible":
                self.refuse("inbox that remembers ids")
            for _, message in verdict.sends:
                self.check_message(message)
                check_also(message)


class WithoutSessions:
    """The part of a broker about sessions, where there are none."""

    refusals: ClassVar[Refusals]

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Refuse."""
        self.refusals.refuse("sessions")

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Refuse."""
        self.refusals.refuse("sessions")

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Refuse."""
        self.refusals.refuse("sessions")

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Refuse."""
        self.refusals.refuse("sessions")

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Refuse."""
        self.refusals.refuse("sessions")


class WithoutDeferral:
    """The part of a broker about deferred messages, where there are none."""

    refusals: ClassVar[Refusals]

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Refuse."""
        self.refusals.refuse("deferred messages")

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Refuse."""
        self.refusals.refuse("deferred messages")


class WithoutInbox:
    """The part of a broker about handled ids, where none are remembered."""

    refusals: ClassVar[Refusals]

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Refuse."""
        self.refusals.refuse("inbox that remembers ids")
