"""Messages to test handlers with: real ones, which record the handler's verbs."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

import tenure
from tenure import testing
from tenure._queue.received import Message, Received
from tenure.testing import Abandon, Complete, DeadLetter, Defer, GiveBack

VERBS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "complete": (lambda one: one.complete(), Complete()),
    "complete and send": (
        lambda one: one.complete(sends=[("results", tenure.Outgoing(b"5"))], remember=60),
        Complete((("results", tenure.Outgoing(b"5")),), 60.0),
    ),
    "abandon": (lambda one: one.abandon(3.0), Abandon(3.0)),
    "defer": (lambda one: one.defer(), Defer()),
    "dead-letter": (lambda one: one.dead_letter("odd", "very"), DeadLetter("odd", "very")),
    "give back": (lambda one: one.give_back(), GiveBack()),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verdict_is_recorded_and_final(verb: str) -> None:
    act, verdict = VERBS[verb]
    one = testing.message(b"x")
    assert (one.verdict, one.sends) == (None, ())
    await act(one)
    assert one.verdict == verdict
    for name in VERBS:
        with pytest.raises(tenure.LockLost, match="message 'orders--1' of 'orders'"):
            await VERBS[name][0](one)
    with pytest.raises(tenure.LockLost):
        await one.renew()
    assert one.verdict == verdict


@pytest.mark.parametrize("verb", VERBS)
def test_a_verdict_is_recorded_and_final_in_threads(verb: str) -> None:
    act, verdict = VERBS[verb]
    one = testing.message_for_threads(b"x")
    assert isinstance(one, tenure.sync.Message)
    act(one)
    assert one.verdict == verdict
    with pytest.raises(tenure.LockLost):
        one.complete()


async def test_it_has_the_fields_of_a_received_message() -> None:
    one = testing.message(
        json={"a": 1},
        queue="mine",
        id="order-7",
        headers={"from": "shop"},
        delivery_count=3,
        sequence=7,
        session="s",
        priority=4,
        reply_to="answers",
        correlation_id="c",
        enqueued_at=5.0,
        lock=60,
    )
    assert isinstance(one, tenure.Message)
    assert (one.queue, one.id, one.json(), one.delivery_count, one.sequence) == ("mine", "order-7", {"a": 1}, 3, 7)
    assert one.headers == {"content-type": "application/json", "from": "shop"}
    assert (one.session, one.priority, one.reply_to, one.correlation_id) == ("s", 4, "answers", "c")
    assert one.enqueued_at == 5.0
    assert one.locked_until == pytest.approx(time.time() + 60, abs=30)
    assert one.decode(dict[str, int]) == {"a": 1}
    assert repr(one) == "<RecordingMessage 'order-7' of 'mine', 7 bytes, delivery 3>"


async def test_a_reply_is_recorded() -> None:
    one = testing.message(b"x", reply_to="answers", id="question")
    await one.reply(json=[1])
    [(queue, answer)] = one.sends
    assert (queue, answer.body, answer.correlation_id) == ("answers", b"[1]", "question")
    with pytest.raises(tenure.ConfigError, match="has no reply_to"):
        await testing.message(b"x").reply(b"y")


async def test_a_lock_can_be_renewed_and_lost() -> None:
    one = testing.message(b"x", lock=60)
    assert await one.renew() == one.locked_until == pytest.approx(time.time() + 60, abs=30)
    assert one.renewals == 1
    one.lose_lock()
    with pytest.raises(tenure.LockLost):
        await one.complete()
    assert one.verdict is None
    one.note_settling()
    one.note_settled()


async def test_an_error_is_recorded_with_its_traceback() -> None:
    one = testing.message(b"x", delivery_count=10)
    await one.abandon(error=ValueError("odd"))
    assert isinstance(one.verdict, Abandon)
    assert one.verdict.error is not None
    assert (one.verdict.error.type, one.verdict.error.message) == ("ValueError", "odd")


def test_one_for_a_process_has_no_verbs() -> None:
    one = testing.message_for_process(json=[1])
    assert type(one) is Received
    assert not isinstance(one, Message)
    assert pickle.loads(pickle.dumps(one)).json() == [1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"body": "text"}, "body must be bytes, not str"),
        ({"body": b"x", "json": 1}, "body and json can't both be given"),
        ({"delivery_count": 0}, "delivery_count must be a whole number of at least 1, not 0"),
        ({"queue": "a$b"}, "must not contain"),
        ({"headers": {"a": None}}, "the header 'a' must be text"),
        ({"body": b"x" * (2**20 + 1)}, "must not be larger than"),
    ],
)
def test_invalid_messages_are_refused(options: Any, complaint: str) -> None:
    for make in (testing.message, testing.message_for_threads, testing.message_for_process):
        with pytest.raises(tenure.ConfigError, match=complaint):
            make(**options)
