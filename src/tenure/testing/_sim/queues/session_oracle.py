"""The oracle of sessions: a model of each session beside the broker, with which its answers are compared.

================  =====================================================================================================
``two owners``    a session was locked to a consumer while it was locked to another
``order``         a message was handed out before an earlier one of its session that was due, or sent out of order
``session``       a message was handed out that is of another session, or of none
``state``         a session has another state than its last owner stored
``stale verb``    a session was received from, renewed, released or its state stored under no lock, or another one
``false no``      one of these was refused under a good lock
``token``         a token was given out twice
``held on``       a session was still locked long after the last of its messages
================  =====================================================================================================

Deliveries of a session are also checked as all others are: see :mod:`tenure.testing._sim.queues.oracle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.broker import Claim, NoSession
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.verdicts import Lapsed, Renewed, Settled
from tenure.testing._sim.queues.oracle import OPEN, Entry, Oracle
from tenure.testing._sim.world import BLUR


@dataclass(slots=True, eq=False)
class SessionModel:
    """The model of a session. All moments are by the broker's clock."""

    name: str
    token: Token | None = None
    until: float = -math.inf
    state: bytes | None = None
    owners: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    """Those of its messages that were handed out, and may be open."""
    handed_out: list[tuple[float, int]] = field(default_factory=list)
    """When which of them was, by sequence."""


class SessionOracle:
    """Follow a broker through the verbs of sessions.

    Args:
        oracle: Follows the messages.
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.sessions: dict[str, SessionModel] = {}

    # --- lookups ---

    def locked_until(self, held: SessionLock) -> float:
        """Return until which true moment *held* has its lock; minus infinity if it has none any more."""
        session = self.sessions.get(held.session)
        if session is None or session.token != held.token:
            return -math.inf
        return self._oracle.clock.moment(session.until)

    def earlier(self, delivery: Delivery) -> list[Entry]:
        """Return the messages of the session that come before *delivery*, are open, and were handed out already."""
        session = self.sessions.get(delivery.session or "")
        if session is None:
            return []
        return [one for one in session.entries.values() if one.sequence < delivery.sequence and one.end_state == OPEN]

    @property
    def owners(self) -> int:
        """How often a session was locked to a consumer."""
        return sum(session.owners for session in self.sessions.values())

    # --- answers of the broker ---

    def accepted(self, answer: SessionLock | NoSession, lock: float, now: float) -> None:
        """The broker has locked a session, or has none."""
        if isinstance(answer, NoSession):
            return
        session = self.sessions.setdefault(answer.session, SessionModel(answer.session))
        if session.token is not None and now < session.until - BLUR:
            left = session.until - now
            self._violated("two owners", f"{session.name} was given away {left:.3f} s before its lock ended")
        self._oracle.new_token(answer.token)
        if answer.state != session.state:
            self._violated("state", f"{session.name} has the state {answer.state!r}, {session.state!r} was stored")
        session.token, session.until = answer.token, now + lock
        session.owners += 1

    def claimed(self, held: SessionLock, answer: Claim | Lapsed, now: float) -> None:
        """The broker has handed out messages of a session."""
        session = self._locked(held, not isinstance(answer, Lapsed), "received from", now)
        for delivery in answer.deliveries if isinstance(answer, Claim) else ():
            if delivery.session != held.session or delivery.token != held.token:
                self._violated("session", f"{delivery.id} of {delivery.session} was handed out for {held.session}")
            until = session.until if session is not None else now
            self._handed_out(self.sessions[held.session], delivery, until, now)

    def _handed_out(self, session: SessionModel, delivery: Delivery, until: float, now: float) -> None:
        known = self._oracle.entries.get(delivery.sequence)
        for entry in self.earlier(delivery):
            if not _is_out(entry, session.token, now) and not self._oracle.is_dead_by_time(entry, now):
                self._violated("order", f"{delivery.id} was handed out before {entry.sent.label} of {session.name}")
        found = self._oracle.handed_out(delivery, until, now)
        if found is None:
            return
        if known is None:
            for moment, sequence in reversed(session.handed_out):
                if moment <= found.visible_at + BLUR:
                    break
                if sequence > delivery.sequence:
                    self._violated("order", f"{sequence} was handed out before {delivery.id} of {session.name}")
        session.entries[delivery.sequence] = found
        session.handed_out.append((now, delivery.sequence))

    def renewed(
        self, held: Sequence[Any], answers: Sequence[Renewed | Lapsed | NoAnswer], lock: float, now: float
    ) -> None:
        """The broker has answered a renewal; messages that are renewed by themselves are the other oracle's."""
        for one, answer in zip(held, answers, strict=True):
            if isinstance(answer, NoAnswer) or not isinstance(one, SessionLock):
                continue
            session = self._locked(one, isinstance(answer, Renewed), "renewed", now)
            if session is None or not isinstance(answer, Renewed):
                continue
            if answer.locked_until < session.until - BLUR:
                sooner = session.until - answer.locked_until
                self._violated("shortened", f"the lock of {session.name} ends {sooner:.3f} s sooner")
            session.until = max(session.until, now + lock)
            for entry in _out(session):
                entry.until = session.until

    def released(self, held: SessionLock, answer: Settled | Lapsed, now: float) -> None:
        """The broker has taken a session back, and with it what its owner has not settled."""
        session = self._locked(held, isinstance(answer, Settled), "released", now)
        if session is None:
            return
        for entry in _out(session):
            self._oracle.given_back(entry, now)
        session.token, session.until = None, -math.inf

    def state_written(self, held: SessionLock, state: bytes, answer: Settled | Lapsed, now: float) -> None:
        """The broker has stored the state of a session, or refused to."""
        session = self._locked(held, isinstance(answer, Settled), "given a state", now)
        if session is not None:
            session.state = state

    def _locked(self, held: SessionLock, said_yes: bool, verb: str, now: float) -> SessionModel | None:
        """Return the session of *held* if its lock is good and the broker thought so, too."""
        session = self.sessions.get(held.session)
        is_good = session is not None and session.token == held.token and now < session.until
        if is_good != said_yes:
            kind = "stale verb" if said_yes else "false no"
            self._violated(kind, f"{held.session} (token {held.token}) was {'' if said_yes else 'not '}{verb}")
        return session if is_good and said_yes else None

    # --- at the end ---

    def audit(self, state_of: Callable[[str], bytes | None], now: float) -> None:
        """Compare the sessions of the drained queue with the model."""
        for session in self.sessions.values():
            if session.token is not None and now < session.until:
                self._violated("held on", f"{session.name} is still locked")
            elif (state := state_of(session.name)) != session.state:
                self._violated("state", f"{session.name} has the state {state!r}, {session.state!r} was stored")
        self._sent_in_order()

    def _sent_in_order(self) -> None:
        last: dict[tuple[int, str | None], int] = {}
        for sent in self._oracle.sent.values():
            if sent.session is None or not sent.sequences or not sent.is_named:
                continue
            batch = sent.batch, sent.session
            sequence = min(sent.sequences)
            if sequence < last.get(batch, -1):
                self._violated("order", f"{sent.label} stands before what was sent before it")
            last[batch] = sequence

    def _violated(self, kind: str, what: str) -> None:
        self._oracle.violated(kind, what)


def _out(session: SessionModel) -> Iterable[Entry]:
    return [one for one in session.entries.values() if one.end_state == OPEN and one.token == session.token]


def _is_out(entry: Entry, token: Token | None, now: float) -> bool:
    """Return whether *entry* is with the owner that has *token*."""
    return entry.token is not None and entry.token == token and now < entry.until
