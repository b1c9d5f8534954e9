"""Plain values that users get: each can be copied, pickled, converted to dicts, and written as JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import types
import typing
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pydantic
import pytest

import tenure
from tenure import _lease as lease
from tenure import events
from tenure._backends.memory import QUEUE_TRAITS, TRAITS
from tenure._diagnosis import Diagnosis
from tenure._frozen import FrozenDict
from tenure._opened import Fact
from tenure._queue import message
from tenure._queue.bodies import decode, encode
from tenure._queue.failures import Failure
from tenure._queue.message import Attempt, DeadMessage, Delivery, LiveMessage, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.received import Received

FAILURE = Failure("ValueError", "7", "Traceback …")
HEADERS: FrozenDict[str, message.HeaderValue] = FrozenDict({"a": 1, "b": "c"})
LEADER = lease.Leader("ann", 7, FrozenDict({"address": "10.0.0.1"}), 3.5)
MEMBER = tenure.PartitionMember("ann-1f", 2, 3, ("eu", "us"), FrozenDict({"address": "10.0.0.1"}))
LIVE = LiveMessage(
    *("orders", 7, "id", b"\xff", HEADERS, "locked", 3, 1.5, 2.5, None, "s", 4, "replies", "c", "host:7", 1.25)
)
DEAD = DeadMessage(
    *("orders", 7, "id", b"\xff", HEADERS, 3, 1.5, "s", 4, "replies", "c", "odd", "very", 2.5, FAILURE),
    (Attempt(1, 2.0, "abandoned", FAILURE), Attempt(2, 2.5, "expired")),
)


def some(kind: Any) -> Any:
    """Return some value of a field of this *kind*."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[0]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return some(typing.get_args(kind)[0])
    return {str: "text", int: 7, float: 1.5, bool: True}[kind]


def event_of(kind: type[events.Event]) -> events.Event:
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: some(hints[field.name]) for field in dataclasses.fields(kind)})


EVENTS = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
VALUES: list[Any] = [
    *map(event_of, EVENTS),
    LEADER,
    tenure.CandidateStatus("chair", "leading", 7, 3.5, 0.5, is_ready=True),
    MEMBER,
    tenure.PartitionGroup("orders", FrozenDict({"eu": LEADER, "us": None}), (MEMBER,), ("orders.eu", "orders.us")),
    tenure.HandlerStatus("orders", 10, 3, True),
    tenure.ScheduleStatus("tidy", "tidy", "0 3 * * *", "Europe/Berlin", last=1.5e9, next=1.6e9),
    tenure.ServiceStatus(
        (tenure.HandlerStatus("orders", 10, 3, True),), (tenure.CandidateStatus("chair"),), is_ready=True
    ),
    LIVE,
    DEAD,
    FAILURE,
    Stats(1, 2, 3, 4, 5, 6.5),
    Outgoing(b"x"),
    Outgoing(b"\xff", headers=HEADERS, at=datetime(2026, 1, 1, tzinfo=UTC), session="s"),
    tenure.Timing(15.0),
    tenure.RetryPolicy(never=(ValueError,)),
    TRAITS,
    QUEUE_TRAITS,
    Diagnosis("memory:", 0.5, TRAITS, [Fact("a", "b", "c", "d")], QUEUE_TRAITS),
    DEAD.history[0],
    tenure.Death("odd", "very", 2.5, FAILURE, DEAD.history),
    Fact("a", "b"),
    tenure.QueueSettings(lock=5, dead_retention=60.0, max_locked=5, rate=(100, 60.0), session_rate=(1, 0.5)),
]


def ids(value: Any) -> str:
    return type(value).__name__


def test_every_public_dataclass_is_tried() -> None:
    public = [getattr(tenure, name) for name in tenure.__all__]
    kinds = {kind for kind in [*public, *EVENTS] if dataclasses.is_dataclass(kind)}
    with_secrets = {tenure.Url, tenure.Credentials}  # unit/test_secrets.py, unit/test_logins.py
    assert kinds - with_secrets <= {type(value) for value in VALUES}


@pytest.mark.parametrize("value", VALUES, ids=ids)
def test_it_can_be_copied_and_pickled(value: Any) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)) == value
    assert copy.deepcopy(value) == copy.copy(value) == value
    assert dataclasses.replace(value) == value


@pytest.mark.parametrize("value", VALUES, ids=ids)
def test_it_can_be_converted_and_written_as_json(value: Any) -> None:
    apart = dataclasses.asdict(value)
    assert list(apart) == [field.name for field in dataclasses.fields(value)]
    json.dumps(apart, default=repr)
    if not isinstance(value, tenure.RetryPolicy):  # its types of exceptions have no JSON form
        encode(value)


@pytest.mark.parametrize("value", [LEADER, LIVE, DEAD, Stats(1), *map(event_of, EVENTS)], ids=ids)
def test_it_can_be_read_from_json(value: Any) -> None:
    assert decode(encode(value), type(value)) == value


def test_a_leader_is_json_as_frameworks_write_it() -> None:
    said = {"holder": "ann", "token": 7, "metadata": {"address": "10.0.0.1"}, "remaining": 3.5}
    assert json.loads(json.dumps(dataclasses.asdict(LEADER))) == said
    assert pydantic.TypeAdapter(lease.Leader).dump_python(LEADER, mode="json") == said
    assert pydantic.TypeAdapter(lease.Leader).validate_python(LEADER) == LEADER


def test_a_received_message_can_be_copied_and_pickled() -> None:
    received = Received(Delivery("orders", 7, 1, "id", b"x", HEADERS, 1, 0.0, 0.0))
    for other in (pickle.loads(pickle.dumps(received)), copy.deepcopy(received)):
        assert (other.id, other.body, other.headers) == ("id", b"x", HEADERS)


async def test_the_values_of_an_election_and_a_queue_can_be_converted() -> None:
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders")
        await queue.send(b"x", headers={"a": 1})
        [one] = await queue.receive()
        await one.dead_letter("odd")
        [letter] = await queue.dead_letters.peek()
        assert dataclasses.asdict(letter)["headers"] == {"a": 1}
        async with backend.election("report", metadata={"a": "b"}).campaign():
            leader = await backend.election("report").leader()
            assert leader is not None
            assert dataclasses.asdict(leader)["metadata"] == {"a": "b"}


def test_the_mappings_in_them_can_not_be_changed() -> None:
    changes: list[Callable[[Any], object]] = [
        lambda it: it.update(a=1),
        lambda it: it.__setitem__("a", 1),
        lambda it: it.__delitem__("a"),
        lambda it: it.pop("a"),
        lambda it: it.popitem(),
        lambda it: it.setdefault("z", 1),
        lambda it: it.clear(),
        lambda it: it.__ior__({"a": 1}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="can't be changed; change a copy"):
            change(copy.deepcopy(HEADERS))
    assert HEADERS | {"c": 2} == {"a": 1, "b": "c", "c": 2}
    assert type(HEADERS.copy()) is dict
    assert message.NO_HEADERS == {}
