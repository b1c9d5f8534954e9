"""Single requests to a Storage Queue."""

from __future__ import annotations

from collections.abc import Callable

from azure.storage.queue import QueueMessage
from azure.storage.queue.aio import QueueClient

from tenure._backends.azure_storage.client import LoopConnections, Refused, unless_refused
from tenure._backends.azure_storage.names import POISON_SUFFIX, encode_metadata, queue_of
from tenure._backends.azure_storage.records import FoundMessage, timestamp_of
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._queue.checks import DEAD_SUFFIX
from tenure._runtime.remote_clock import WHOLE_SECONDS

PAGE = 32
"""The most messages that Azure delivers or shows in one answer."""

NO_QUEUE = ("QueueNotFound",)
NOT_OURS = ("MessageNotFound", "PopReceiptMismatch", *NO_QUEUE)


def client_of(connections: LoopConnections, queue: str) -> QueueClient:
    """Return Microsoft's client for *queue*, or for its dead letters."""
    is_dead = queue.endswith(DEAD_SUFFIX)
    name = queue_of(queue.removesuffix(DEAD_SUFFIX))
    return connections.queues.get_queue_client(name + POISON_SUFFIX if is_dead else name)


async def create(client: QueueClient, queue: str, metadata: dict[str, str] | None = None) -> None:
    """Create *queue* unless it exists."""
    named = {"tenure_name": encode_metadata(queue), **(metadata or {})}
    await unless_refused(client.create_queue(metadata=named), "QueueAlreadyExists")


async def put(
    connections: LoopConnections, *, queue: str, text: str, delay: int, missing: Callable[[], None] = lambda: None
) -> QueueMessage:
    """Put a message into *queue*, which is created if it doesn't exist; then *missing* is called."""
    client = client_of(connections, queue)
    for _ in range(2):
        answer = await unless_refused(client.send_message(text, visibility_timeout=delay, time_to_live=-1), *NO_QUEUE)
        if not isinstance(answer, Refused):
            return answer
        missing()
        await create(client, queue)
    return await client.send_message(text, visibility_timeout=delay, time_to_live=-1)


async def count(connections: LoopConnections, queue: str) -> int:
    """Return approximately how many messages *queue* has, invisible ones included."""
    answer = await unless_refused(client_of(connections, queue).get_queue_properties(), *NO_QUEUE)
    return 0 if isinstance(answer, Refused) else answer.approximate_message_count or 0


async def peek(connections: LoopConnections, queue: str) -> list[FoundMessage]:
    """Show up to 32 visible messages of *queue*."""
    answer = await unless_refused(client_of(connections, queue).peek_messages(max_messages=PAGE), *NO_QUEUE)
    return [] if isinstance(answer, Refused) else [FoundMessage.of(queue, one, is_delivery=False) for one in answer]


async def lock_page(
    connections: LoopConnections,
    *,
    queue: str,
    limit: int,
    seconds: int,
    clock: ServiceClock,
    missing: Callable[[], None] = lambda: None,
) -> list[FoundMessage]:
    """Lock up to 32 visible messages of *queue* for *seconds*; if it doesn't exist, call *missing*."""
    asked_at = clock.local.now()
    pages = client_of(connections, queue).receive_messages(
        messages_per_page=limit, max_messages=limit, visibility_timeout=seconds
    )

    async def first() -> list[QueueMessage]:
        async for page in pages.by_page():
            return [one async for one in page]
        return []

    answer = await unless_refused(first(), *NO_QUEUE)
    if isinstance(answer, Refused):
        missing()
    found = []
    for one in () if isinstance(answer, Refused) else answer:
        now = timestamp_of(one.next_visible_on) - seconds
        found.append(FoundMessage.of(queue, one, now, is_delivery=True))
    if found:
        clock.learn(found[0].now, asked_at, WHOLE_SECONDS)
    return found
