"""The conditions of ``peek``, ``purge`` and ``redrive``, checked and made a selection for the broker."""

from __future__ import annotations

from collections.abc import Collection

from tenure._checks import check_seconds
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.checks import check_collection, check_text
from tenure._queue.identity import chosen
from tenure._queue.message import STATES, State
from tenure.errors import ConfigError


def select_live(
    states: Collection[State] | None,
    ids: Collection[str] | None,
    sequences: Collection[int] | None,
    session: str | None,
    sent_before: float | None,
) -> LiveSelection:
    """Return the selection of live messages for which all conditions hold that are given.

    Raises:
        ConfigError: A condition can't be.
    """
    check_collection("states", states)
    for state in set(states or ()) - STATES:
        raise ConfigError(
            f"a state must be ready, locked, delayed or deferred, not {state!r:.80}; dead messages are in dead_letters"
        )
    named, numbered = chosen(ids, sequences)
    if session is not None:
        check_text("session", session, optional=True)
    if sent_before is not None:
        check_seconds("sent_before", sent_before, what="finite Unix seconds")
    return LiveSelection(
        states=None if states is None else frozenset(states),
        sequences=numbered,
        ids=named,
        session=session,
        sent_before=sent_before,
    )


def select_dead(
    ids: Collection[str] | None, sequences: Collection[int] | None, reason: str | None, dead_before: float | None
) -> Selection:
    """Return the selection of dead letters for which all conditions hold that are given.

    Raises:
        ConfigError: A condition can't be.
    """
    named, numbered = chosen(ids, sequences)
    if reason is not None:
        check_text("reason", reason, optional=True)
    if dead_before is not None:
        check_seconds("dead_before", dead_before, what="finite Unix seconds")
    return Selection(ids=named, sequences=numbered, reason=reason, dead_before=dead_before)
