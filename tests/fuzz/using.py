"""What is done with what was read: shown, counted, compared, written again. And values that a store can hold at all."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import math
from collections.abc import Coroutine, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from tenure._checks import LONGEST
from tenure._election.store import NAME_MAX
from tenure._lease import TOKEN_MAX, HeldBy, Vacant
from tenure._queue.checks import COUNT_MAX, INT_MAX
from tenure._queue.failures import Failure
from tenure._queue.headers import HEADERS_MAX
from tenure._queue.message import (
    HISTORY_MAX,
    Attempt,
    DeadMessage,
    Death,
    Delivery,
    Died,
    LiveMessage,
    dead_message_of,
    live_message_of,
)
from tenure._queue.notes import Notes
from tenure._queue.outgoing import PRIORITY_MAX, Outgoing

NOW = 1_800_000_000.0

FAILURE = Failure("ValueError", "it is no order", "Traceback (most recent call last):\n  …\nValueError: it is no order")
HISTORY = (Attempt(1, NOW - 60.0, "abandoned", FAILURE), Attempt(2, NOW - 30.0, "expired"))
HEADERS: dict[str, Any] = {"tenant": "blue", "priority class": 3, "share": 0.25, "is new": True, "ort": "Zürich"}

SENT = (
    Outgoing(b"body"),
    Outgoing(
        b'{"order": 17}',
        id="order-17",
        headers={"content-type": "application/json", **HEADERS},
        reply_to="answers",
        correlation_id="request-5",
        expires_in=3_600.0,
    ),
)


# --- what a store can hold ---------------------------------------------------------------------------------------


def as_text(value: Any, most: int = 2_000_000) -> str:
    """Return a value as text without surrogates, as it comes out of any store that has UTF-8."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")[:most]
    text = value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)
    return text.encode(errors="replace").decode()[:most]


def as_bytes(value: Any) -> bytes:
    """Return a value as bytes; a text, also one with surrogates, as it would be written."""
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)
    return text.encode("utf-8", "surrogatepass")


def as_texts(value: Any) -> dict[str, str]:
    """Return a value as the texts by name that any store of metadata has."""
    return {as_text(name): as_text(one) for name, one in value.items()} if isinstance(value, dict) else {}


def as_objects(value: Any) -> list[Any]:
    """Return the values in a list, or that one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def as_number(value: Any, bits: int = 64) -> int:
    """Return a value as a whole number of so many bits."""
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        number = 0
    return min(max(number, -(1 << (bits - 1))), (1 << (bits - 1)) - 1)


def as_double(value: Any) -> float:
    """Return a value as a number of double precision."""
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return math.inf


def through_json(value: Any) -> Any:
    """Return a value as it comes out of a JSON text."""
    try:
        return json.loads(json.dumps(value, default=str, skipkeys=True))
    except (ValueError, RecursionError):
        return None


# --- use ---------------------------------------------------------------------------------------------------------


def use_delivery(one: Delivery) -> None:
    """Show a delivery, and check what a handler and every other store rely on."""
    use_message(one)
    assert isinstance(one.body, bytes)
    assert 0 <= one.delivery_count <= COUNT_MAX, one.delivery_count
    if one.death is not None:
        use_death(one.death)
        assert repr(dead_message_of(one.queue, one, one.death))
    assert repr(live_message_of(one, "ready"))


def use_message(one: Delivery | LiveMessage | DeadMessage) -> None:
    assert repr(one)
    assert one.id.encode()
    assert 0 <= one.priority <= PRIORITY_MAX
    assert type(one.sequence) is int
    assert -INT_MAX - 1 <= one.sequence <= INT_MAX, one.sequence
    use_moment(one.enqueued_at)
    for text in (one.reply_to, one.correlation_id, one.session):
        use_text(text or "")
    sizes = (len(name) + (len(value) if isinstance(value, str) else 0) for name, value in one.headers.items())
    assert sum(sizes) <= HEADERS_MAX
    for value in one.headers.values():
        assert type(value) in (str, int, float, bool)
        assert type(value) is not int or -INT_MAX - 1 <= value <= INT_MAX
    use_text(json.dumps(dict(one.headers), allow_nan=False, ensure_ascii=False))


def use_text(text: str) -> None:
    """Check that any store can keep a text."""
    assert isinstance(text.encode(), bytes)


def use_death(death: Death) -> None:
    assert repr(death)
    use_text(death.reason + death.description)
    use_moment(death.at)
    use_history(death.history)


def use_history(history: Sequence[Attempt]) -> None:
    assert len(history) <= HISTORY_MAX
    for one in history:
        assert 1 <= one.number <= COUNT_MAX
        use_moment(one.at)
        if one.error is not None:
            use_text(one.error.type + one.error.message + one.error.traceback)


def use_moment(at: float) -> None:
    assert 0.0 <= at <= LONGEST, at
    assert datetime.fromtimestamp(at, UTC).isoformat()


def use_notes(notes: Notes, count: int) -> Iterable[Notes]:
    """Return what becomes of the notes of a message: it fails, its locks expire, it dies, it is redriven."""
    use_history(notes.history)
    assert 0 <= notes.before <= len(notes.history)
    later = notes.with_expired_attempts(count, NOW).with_attempt(Attempt(max(1, count), NOW, "abandoned", FAILURE))
    use_history(later.history)
    assert 0 <= later.before <= len(later.history)
    dead = later.dead("max_deliveries", f"after {count}", count, NOW)
    return notes, later, dead, dead.redriven(), notes.redriven()


def use_died(died: Iterable[Died]) -> None:
    for one in died:
        assert repr(one)
        assert 0 <= one.delivery_count <= INT_MAX
        use_text(one.id + one.reason)


def use_lease(seen: HeldBy | Vacant) -> None:
    """Show what is known of a lease, and check what every caller relies on."""
    assert repr(seen)
    assert 0 <= seen.token <= TOKEN_MAX
    if isinstance(seen, Vacant):
        assert seen.vacant_for is None or 0.0 <= seen.vacant_for <= LONGEST
        return
    use_text(seen.holder)
    assert seen.remaining is None or 0.0 <= seen.remaining <= LONGEST
    assert all(isinstance(one, str) for one in [*seen.metadata, *seen.metadata.values()])
    use_text(json.dumps(dict(seen.metadata), ensure_ascii=False))


def use_holder(holder: str) -> None:
    assert len(holder) <= NAME_MAX
    use_text(holder)


# --- code that awaits --------------------------------------------------------------------------------------------


def drive(awaited: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine whose answers are all there: it waits for nothing, and needs no loop."""
    try:
        awaited.send(None)
    except StopIteration as end:
        return end.value
    awaited.close()
    raise AssertionError("it waits for something that is no answer")


@cache
def _runner() -> asyncio.Runner:
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def on_loop(awaited: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that needs a loop."""
    return _runner().run(awaited)


class Answers:
    """A client whose requests are answered by these, one after the other; then by *last*, an error."""

    def __init__(self, answers: Any, last: Exception, **others: Any) -> None:
        self._left = as_objects(answers)[:150]
        self._last = last
        self.__dict__.update(others)

    def next(self) -> Any:
        """Return the next answer."""
        if not self._left:
            raise self._last
        return self._left.pop(0)

    async def answer(self, *_: object, **__: object) -> Any:
        """Return the next answer to any request."""
        return self.next()

    async def run(self, act: Any, **_: object) -> Any:
        """Do what *act* does with a connection."""
        found = act(self)
        return await found if inspect.isawaitable(found) else found


def always(answer: Any) -> Any:
    """Return a coroutine function that returns *answer*, whatever it is asked."""

    async def answered(*_: object, **__: object) -> Any:
        return answer

    return answered


def nothing(*_: object) -> None:
    """Do nothing."""
