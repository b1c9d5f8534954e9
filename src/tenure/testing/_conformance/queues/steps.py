"""Fixtures and steps for the suites of queues."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
import pytest_asyncio

from tenure._lease import NoAnswer
from tenure._queue.broker import EVERYTHING, Broker, Claim
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.failures import Failure
from tenure._queue.message import DeadMessage, Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import DeadLetter, Lapsed, Settled, Settlement, Verdict
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness

LATE = 1.05  # by which share longer than a lock to wait before it is surely over

ERROR = Failure("ValueError", "no such customer: 'Ünïcödé-名前'", "Traceback …\nValueError")


class QueueSuite:
    """Gives each test a harness and a name."""

    harness: ClassVar[type[QueueHarness]]
    """The harness of the store under test: a class, made anew for each test."""
    pytestmark: ClassVar[pytest.MarkDecorator] = pytest.mark.asyncio

    @pytest_asyncio.fixture(name="harness")
    async def _open_harness(self) -> AsyncIterator[QueueHarness]:
        """Open a fresh storage for one test."""
        harness = self.harness()
        await harness.start()
        try:
            yield harness
        finally:
            await harness.close()

    @pytest.fixture
    def name(self) -> str:
        """Give a name that no other test uses: the storage may be shared."""
        return f"conformance-{secrets.token_hex(6)}"


def needs(support: str) -> None:
    """Skip the test if *support*, a trait of the broker, is ``impossible``."""
    if support == "impossible":
        pytest.skip("this broker can't do it")


def bodies(deliveries: object) -> list[bytes]:
    """Return the bodies of *deliveries*, in order."""
    return [one.body for one in deliveries]  # type: ignore[attr-defined]


async def send(broker: Broker, name: str, *contents: bytes) -> list[str]:
    """Send plain messages."""
    return list(await broker.send(name, [Outgoing(body) for body in contents]))


async def receive(broker: Broker, name: str, harness: QueueHarness, limit: int = 100) -> list[Delivery]:
    """Claim what is ready."""
    return list((await broker.receive(name, limit, harness.lock)).deliveries)


async def receive_some(
    broker: Broker, name: str, harness: QueueHarness, count: int, least: int | None = None
) -> list[Delivery]:
    """Claim *count* messages that are ready, or are soon, where a store delivers them one by one; or *least*."""
    found: list[Delivery] = []

    async def look() -> bool:
        found.extend(await receive(broker, name, harness, count - len(found)))
        return len(found) >= (count if least is None else least)

    await until(look)
    return found


async def comes_now(broker: Broker, harness: QueueHarness, name: str, body: bytes) -> None:
    """Claim a message that is due: at once, or a little later, where delays last longer than they should."""
    found: list[bytes] = []

    async def has_come() -> bool:
        found.extend(bodies(await receive(broker, name, harness)))
        return body in found

    await until(has_come, within=60.0 if harness.traits.delay_lag else 0.0, what=f"the arrival of {body!r}")


async def settle(broker: Broker, deliveries: object, verdict: Verdict) -> list[Settled | Lapsed | NoAnswer]:
    """Pass one verdict on several deliveries."""
    return list(await broker.settle([Settlement(one, verdict) for one in deliveries]))  # type: ignore[attr-defined]


async def dead_letter(
    broker: Broker, harness: QueueHarness, name: str, *contents: bytes, reason: str = "because"
) -> None:
    """Send messages, and dead-letter them at once."""
    await send(broker, name, *contents)
    await settle(broker, await receive(broker, name, harness), DeadLetter(reason, "", ERROR))


async def place(broker: Broker, harness: QueueHarness, queue: str, body: bytes) -> None:
    """Send a message to *queue*; if that is one of dead letters, it dies, and nothing else may be ready."""
    if queue.endswith(DEAD_SUFFIX):
        await dead_letter(broker, harness, queue.removesuffix(DEAD_SUFFIX), body)
    else:
        await send(broker, queue, body)


async def expect_stats(broker: Broker, harness: QueueHarness, name: str, wanted: Stats) -> None:
    """Check the statistics: where they are not exact, what was settled just now may be counted a little later."""
    if harness.traits.exact_stats:
        assert await broker.stats(name) == wanted
        return
    found = Stats()

    async def is_right() -> bool:
        nonlocal found
        found = await broker.stats(name)
        return found == wanted

    try:
        await until(is_right)
    except AssertionError:
        raise AssertionError(f"{found} != {wanted}") from None


async def expect_counts(broker: Broker, harness: QueueHarness, name: str, **wanted: int) -> None:
    """Check some of the counts in the statistics, as :func:`expect_stats` does all."""
    found: dict[str, int] = {}

    async def are_right() -> bool:
        stats = await broker.stats(name)
        found.update({count: getattr(stats, count) for count in wanted})
        return found == wanted

    try:
        await until(are_right, within=0.0 if harness.traits.exact_stats else 60.0)
    except AssertionError:
        raise AssertionError(f"{found} != {wanted}") from None


async def only_dead_letter(broker: Broker, harness: QueueHarness, name: str) -> DeadMessage:
    """Return the only dead letter; where counts aren't exact, a message that has just expired may be one soon."""
    found: list[DeadMessage] = []

    async def is_there() -> bool:
        found[:] = await broker.peek_dead(name, EVERYTHING, 10)
        return len(found) == 1

    await until(is_there, within=0.0 if harness.traits.exact_stats else 60.0, what="the only dead letter")
    return found[0]


async def accept(broker: Broker, name: str, harness: QueueHarness) -> SessionLock:
    """Lock the next free session, which must exist."""
    answer = await broker.accept(name, None, harness.lock)
    assert isinstance(answer, SessionLock), answer
    return answer


async def receive_session(broker: Broker, held: SessionLock, limit: int = 100) -> list[Delivery]:
    """Claim what is ready in a session."""
    claim = await broker.receive_session(held, limit)
    assert isinstance(claim, Claim), claim
    return list(claim.deliveries)
