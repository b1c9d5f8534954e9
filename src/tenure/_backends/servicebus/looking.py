"""Messages that are looked at without a lock, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.codec import Incoming, long_of, received_in
from tenure._backends.servicebus.driver import NOT_FOUND, Refused
from tenure._backends.servicebus.message_format import Received, received
from tenure._backends.servicebus.names import Path
from tenure._queue.checks import INT_MAX
from tenure._queue.page_size import PageSize

PAGE = 100
"""Messages that are asked for at once, at most."""

ACTIVE, DEFERRED, SCHEDULED = 0, 1, 2


async def looked_at(
    namespace: Namespace, path: Path | None, queue: str, after: int = 0
) -> AsyncIterator[tuple[Received, Incoming]]:
    """Yield the messages of an entity with a sequence above *after*, in order; none if there is no such entity."""
    size = PageSize(PAGE)
    while path is not None and after < INT_MAX:
        body = {"from-sequence-number": long_of(after + 1), "message-count": size.messages}
        try:
            page = received_in(await namespace.ask(path, "peek-message", body))
        except Refused as refused:
            if refused.condition == NOT_FOUND:
                return
            raise
        size.learn(message.size for message, _ in page)
        last = after
        for message, _ in page:
            found = received(queue, message)
            after = max(after, found.sequence)
            yield found, message
        if after == last:
            return
