"""The largest messages that a store accepts, and the wordiest failures: what is stored again has room for its notes."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, repeat
from typing import Literal, TypedDict, Unpack

import pytest

from tenure._queue.broker import EVERYTHING, Broker, QueueSettings
from tenure._queue.checks import NAME_MAX, TEXT_MAX
from tenure._queue.failures import MESSAGE_MAX, TRACEBACK_MAX, Failure, traceback_most
from tenure._queue.headers import HEADERS_MAX
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import (
    EXPIRED,
    HISTORY_MAX,
    MAX_DELIVERIES,
    Attempt,
    DeadMessage,
    Delivery,
    SessionLock,
    exhausted_description,
)
from tenure._queue.outgoing import Outgoing, checked
from tenure._queue.verdicts import COMPLETE, DESCRIPTION_MAX, Abandon, DeadLetter, Defer, Settled
from tenure.errors import ConfigError
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    QueueSuite,
    accept,
    needs,
    only_dead_letter,
    receive,
    receive_session,
    settle,
)

Shape = Literal["body", "a header", "many headers"]
"""Which part of a message is as large as it may be; the others take what is left."""

SHAPES: tuple[Shape, ...] = ("body", "a header", "many headers")

WIDE = "\N{GRINNING FACE}"
"""A character of four bytes; of twelve in ASCII JSON."""

FILLERS: dict[Shape, str] = {"body": "\x01", "a header": WIDE}
"""What fills a header: a control character has six bytes in JSON for one. Many headers have nothing but names."""

TEXTS = (WIDE * TEXT_MAX, WIDE * NAME_MAX, WIDE * 128, WIDE * 63, "ü" * 50)
"""Texts to try, the largest first: stores count in characters, or in bytes, or have other limits than tenure's."""

DELIVERIES: dict[Shape, int] = {"body": HISTORY_MAX + 2, "a header": 4, "many headers": 4}
"""How often it is handed out: also more often than a history has attempts."""

REASON, DESCRIPTION = WIDE * TEXT_MAX, WIDE * DESCRIPTION_MAX


LONG = type(WIDE * TEXT_MAX, (Exception,), {})
CAUSES = [LONG(text * (MESSAGE_MAX + TRACEBACK_MAX)) for text in (WIDE, "\udcff", "\x01")]
"""Of the characters in the texts, a lone surrogate is escaped."""


def failures_of(deliveries: int) -> Iterator[Failure]:
    """Yield the longest failures that a handler's may be as text, one for each of so many deliveries, and on."""
    causes = cycle(CAUSES)
    return (
        Failure.of(next(causes), traceback_most(number, deliveries))
        for number in chain(range(1, deliveries), repeat(deliveries))
    )


class StoredAgainSuite(QueueSuite):
    """Whatever ``send`` accepts can be tried, put back, put off, buried and redriven, however wordily it fails."""

    @pytest.mark.parametrize("shape", SHAPES)
    async def test_it_dies_of_its_last_failure_and_its_neighbours_go_on(
        self, harness: QueueHarness, name: str, shape: Shape
    ) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        sent = await largest(broker, harness, name, shape)
        most = DELIVERIES[shape]
        await broker.declare(name, {"max_deliveries": most})
        await broker.send(name, [Outgoing(b"before")])
        await broker.send(name, [sent, Outgoing(b"after")])
        handled: list[bytes] = []
        failures = failures_of(most)
        for number in range(1, most + 1):
            got = await received(broker, harness, name, sent.id, handled)
            as_sent(got, sent)
            assert got.delivery_count == number
            wanted = Settled(dead=True, reason=MAX_DELIVERIES) if number == most else Settled()
            assert told(await settle(broker, [got], Abandon(0.0, next(failures)))) == told([wanted])
        letter = await only_dead_letter(broker, harness, name)
        as_sent(letter, sent)
        description = exhausted_description(most)
        assert (letter.reason, letter.description, letter.delivery_count) == (MAX_DELIVERIES, description, most)
        in_order(harness, letter, most)
        await until(lambda: _all_handled(broker, harness, name, handled, 2))
        assert sorted(handled) == [b"after", b"before"]

    @pytest.mark.parametrize("shape", SHAPES)
    async def test_it_is_dead_lettered_again_and_redriven(self, harness: QueueHarness, name: str, shape: Shape) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        sent = await largest(broker, harness, name, shape)
        failures = failures_of(1)
        await broker.send(name, [sent])
        for life in range(3):
            got = await received(broker, harness, name, sent.id)
            as_sent(got, sent)
            assert got.delivery_count == 1, f"in life {life}"
            assert await settle(broker, [got], DeadLetter(REASON, DESCRIPTION, next(failures))) == [Settled()]
            for reason in (WIDE, REASON):
                letter = await received(broker, harness, dead_letters_of(name), sent.id)
                as_sent(letter, sent)
                assert letter.death is not None
                assert letter.death.reason == (REASON if reason == WIDE else WIDE)
                another = DeadLetter(reason, DESCRIPTION, next(failures))
                assert await settle(broker, [letter], another) == [Settled()]
            letter = await received(broker, harness, dead_letters_of(name), sent.id)
            assert await settle(broker, [letter], Abandon(0.0, next(failures))) == [Settled()]
            dead = await only_dead_letter(broker, harness, name)
            as_sent(dead, sent)
            assert (dead.reason, dead.delivery_count) == (REASON, 1)
            assert dead.description == DESCRIPTION[: len(dead.description)]
            assert await broker.redrive(name, EVERYTHING, None) == 1
        got = await received(broker, harness, name, sent.id)
        as_sent(got, sent)
        assert await settle(broker, [got], COMPLETE) == [Settled()]

    @pytest.mark.parametrize("shape", SHAPES)
    async def test_it_is_put_off_and_expires(self, harness: QueueHarness, name: str, shape: Shape) -> None:
        needs(harness.traits.dead_letters)
        needs(harness.traits.delay)
        broker = await harness.open()
        sent = await largest(broker, harness, name, shape, expires_in=harness.lock * 3)
        delay = max(harness.lock * 0.5, harness.traits.delay_step)
        failures = failures_of(10)
        await broker.declare(name, {"lock": harness.lock})
        await broker.send(name, [sent])
        for number in (1, 2):
            got = await received(broker, harness, name, sent.id)
            as_sent(got, sent)
            assert got.delivery_count == number
            assert await settle(broker, [got], Abandon(delay, next(failures))) == [Settled()]
            assert await receive(broker, name, harness) == []
            await harness.pass_time(delay * 1.02)
        got = await received(broker, harness, name, sent.id)
        assert await settle(broker, [got], Abandon(0.0, next(failures))) == [Settled()]
        await harness.pass_time(harness.lock * 3)
        await broker.receive(name, 10, harness.lock)
        letter = await only_dead_letter(broker, harness, name)
        as_sent(letter, sent)
        assert (letter.reason, letter.delivery_count) == (EXPIRED, 3)
        in_order(harness, letter, 3)
        assert await broker.redrive(name, EVERYTHING, None) == 1
        as_sent(await received(broker, harness, name, sent.id), sent)

    @pytest.mark.parametrize("shape", SHAPES)
    async def test_it_is_deferred(self, harness: QueueHarness, name: str, shape: Shape) -> None:
        needs(harness.traits.deferral)
        broker = await harness.open()
        sent = await largest(broker, harness, name, shape)
        failures = failures_of(3)
        await broker.declare(name, {"max_deliveries": 4})
        await broker.send(name, [sent])
        got = await received(broker, harness, name, sent.id)
        assert await settle(broker, [got], Abandon(0.0, next(failures))) == [Settled()]
        got = await received(broker, harness, name, sent.id)
        assert await settle(broker, [got], Defer()) == [Settled()]
        for number in (3, 4):
            [got] = (await broker.receive_deferred(name, [got.sequence], harness.lock)).deliveries
            as_sent(got, sent)
            assert got.delivery_count == number
            [answer] = await settle(broker, [got], Abandon(0.0, next(failures)))
            assert isinstance(answer, Settled)
            assert answer.dead == (number == 4)
        letter = await only_dead_letter(broker, harness, name)
        as_sent(letter, sent)
        assert (letter.reason, letter.delivery_count) == (MAX_DELIVERIES, 4)

    @pytest.mark.parametrize("shape", SHAPES)
    async def test_its_session_goes_on(self, harness: QueueHarness, name: str, shape: Shape) -> None:
        needs(harness.traits.sessions)
        broker = await harness.open()
        sent = await largest(broker, harness, name, shape, in_session=True)
        failures = failures_of(3)
        await broker.declare(name, {"max_deliveries": 3})
        await broker.send(name, [sent, Outgoing(b"after", session=sent.session)])
        for number in (1, 2, 3):
            held = await accept(broker, name, harness)
            got = await receive_session(broker, held, 1)
            as_sent(got[0], sent)
            assert got[0].delivery_count == number
            [answer] = await settle(broker, got, Abandon(0.0, next(failures)))
            assert isinstance(answer, Settled)
            assert await broker.release(held) == Settled()
        letter = await only_dead_letter(broker, harness, name)
        as_sent(letter, sent)
        assert (letter.reason, letter.delivery_count) == (MAX_DELIVERIES, 3)
        in_order(harness, letter, 3)
        held = await accept(broker, name, harness)
        [got_after] = await receive_session(broker, held)
        assert got_after.body == b"after"
        assert await settle(broker, [got_after], COMPLETE) == [Settled()]
        assert await broker.redrive(name, EVERYTHING, None) == 1
        again = await _received_in(broker, held)
        as_sent(again, sent)
        assert await settle(broker, [again], COMPLETE) == [Settled()]


# --- the largest message ---


class Options(TypedDict, total=False):
    """What the message also is."""

    in_session: bool
    expires_in: float


@dataclass(slots=True)
class Sizes:
    """How large the parts of the largest message are."""

    texts: dict[str, str] = field(default_factory=dict)
    header: str = ""
    """The longest name of a header."""
    body: int = 0
    filling: int = 0
    """How many characters there are in the header that takes what is left; or how many headers."""


_sizes: dict[tuple[object, ...], Sizes] = {}
"""Those found, by the harness and what was asked for: to find them takes many messages."""


async def largest(
    broker: Broker, harness: QueueHarness, name: str, shape: Shape, **options: Unpack[Options]
) -> Outgoing:
    """Return the largest message that *broker* accepts."""
    key = (type(harness), shape, *options.items())
    if key not in _sizes:
        _sizes[key] = await _search(broker, harness, f"{name}-sizes", shape, options)
    return _message(_sizes[key], shape, options)


def _message(sizes: Sizes, shape: Shape, options: Options) -> Outgoing:
    texts = dict(sizes.texts)
    if "id" in texts:
        tag = secrets.token_hex(8)  # a store may know an id for some time
        texts["id"] = tag + texts["id"][len(tag) :]
    headers: dict[str, str] = {}
    if "content-type" in texts:
        headers["content-type"] = texts.pop("content-type")
    if sizes.header:
        headers[sizes.header] = WIDE
    if shape == "many headers":
        headers |= {f"{number:x}": "" for number in range(sizes.filling)}
    elif sizes.filling:
        headers["x"] = FILLERS[shape] * sizes.filling
    body = b"\xff" * sizes.body
    return Outgoing(body, headers=headers, expires_in=options.get("expires_in"), **texts)  # type: ignore[arg-type]


async def _search(broker: Broker, harness: QueueHarness, name: str, shape: Shape, options: Options) -> Sizes:
    body_max = min(QueueSettings().body_max, harness.traits.body_max)
    sizes = Sizes()

    async def is_accepted(tried: Sizes) -> bool:
        try:
            await broker.send(name, checked([_message(tried, shape, options)], body_max))
        except ConfigError:
            return False
        return True

    fields = ["id", "correlation_id", "reply_to", "content-type", *(["session"] if "in_session" in options else [])]
    for one in fields:
        for text in TEXTS:
            tried = replace(sizes, texts={**sizes.texts, one: text})
            if await is_accepted(tried):
                sizes = tried
                break
    for text in TEXTS:
        tried = replace(sizes, header=text)
        if await is_accepted(tried):
            sizes = tried
            break

    async def body_fits(size: int) -> bool:
        return await is_accepted(replace(sizes, body=size))

    async def filling_fits(size: int) -> bool:
        return await is_accepted(replace(sizes, filling=size))

    steps: list[tuple[str, int, Callable[[int], Awaitable[bool]]]] = [
        ("body", body_max, body_fits),
        ("filling", HEADERS_MAX // len(FILLERS.get(shape, "x").encode()), filling_fits),
    ]
    for what, most, fits in steps if shape == "body" else steps[::-1]:
        sizes = replace(sizes, **{what: await _most(most, fits)})  # type: ignore[arg-type]
    assert sizes.texts.keys() == set(fields)
    assert sizes.header
    await broker.delete(name, force=True)
    return sizes


async def _most(most: int, fits: Callable[[int], Awaitable[bool]]) -> int:
    """Return the highest number up to *most* that *fits*; 0 does."""
    least, most = 0, most + 1
    if await fits(most - 1):
        return most - 1
    while most - least > 1:
        middle = (least + most) // 2
        if await fits(middle):
            least = middle
        else:
            most = middle
    return least


# --- checks ---


def as_sent(got: Delivery | DeadMessage, sent: Outgoing) -> None:
    """Check what no delivery may change; texts so long are not shown."""
    for what in ("id", "body", "session", "reply_to", "correlation_id"):
        assert (getattr(got, what) == getattr(sent, what)) is True, f"{what} has changed"
    assert (dict(got.headers) == dict(sent.headers)) is True, "headers have changed"


def in_order(harness: QueueHarness, letter: DeadMessage, last: int) -> None:
    """Check that the history has the newest attempts, up to number *last*: all, or those for which there is room."""
    history: Sequence[Attempt] = letter.history
    if harness.keeps_whole_history:
        assert len(history) == min(last, HISTORY_MAX)
        assert all(one.error is not None and one.error.traceback for one in history)
    assert [one.number for one in history] == [*range(last - len(history) + 1, last + 1)]
    assert {one.outcome for one in history} <= {"abandoned"}


def told(answers: Sequence[object]) -> list[object]:
    """Return the answers without the reason of a death, which not every store tells."""
    return [replace(one, reason=None) if isinstance(one, Settled) else one for one in answers]


# --- steps ---


async def received(
    broker: Broker, harness: QueueHarness, name: str, id_: str | None, handled: list[bytes] | None = None
) -> Delivery:
    """Claim the message with this id; complete others, and note their bodies."""
    found: list[Delivery] = []

    async def look() -> bool:
        for one in await receive(broker, name, harness, 10):
            if one.id == id_:
                found.append(one)
            else:
                assert handled is not None, f"{one.id!r:.40} comes in place of what was sent"
                assert await settle(broker, [one], COMPLETE) == [Settled()]
                handled.append(one.body)
        return bool(found)

    await until(look, what="the largest message")
    [got] = found
    return got


async def _all_handled(broker: Broker, harness: QueueHarness, name: str, handled: list[bytes], count: int) -> bool:
    """Complete the others that are ready; return whether *count* have been."""
    got = await receive(broker, name, harness)
    handled += [one.body for one in got]
    await settle(broker, got, COMPLETE)
    return len(handled) == count


async def _received_in(broker: Broker, held: SessionLock) -> Delivery:
    found: list[Delivery] = []

    async def look() -> bool:
        found.extend(await receive_session(broker, held, 1))
        return bool(found)

    await until(look, what="the message that was redriven")
    return found[0]
