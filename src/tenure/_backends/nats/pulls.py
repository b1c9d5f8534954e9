"""Requests for messages: at once, or when there is one.

The answers to a pull come to an inbox: one message after another, and a status, if fewer come than were asked for, or
they are large. In a cluster, the status may come before the last messages; it says how many do not come. Or it comes
when all messages are there, and the inbox is in use for the next pull: so each pull has a number, which is the last
word of its subject. (Messages don't show it; they have the subject to which they were sent.)

Of a consumer that an account imports, a message with neither body nor headers ends the answer: the server drops the
messages behind it, and the status. They come when their locks end. tenure sends none such; other programs may.

What comes to an inbox that nobody waits at any more is passed to ``give_back``: it is locked, and nobody knows it. A
server sends no further message to an inbox that has no subscription; so the pull ends with that, unless the server that
leads the consumer is another one, which learns of it later. What no consumer has delivered is ignored: any program may
send to an inbox.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tenure._backends.nats.connection import NO_RESPONDERS, Connection, status_of
from tenure._backends.nats.errors import NoJetStream
from tenure._backends.nats.messages import Found, delivered_message
from tenure._foreign import digits, read_or

HEARTBEAT, PENDING = "100", "Nats-Pending-Messages"

ENDED = "ended"
"""The status of an answer that an empty message has ended, as it seems: more may come."""

EMPTY_WAIT = 0.25
"""Seconds without another message after an empty one, after which the answer has ended."""

LINGER = 5.0
"""Seconds for which an inbox that was given up still receives in a cluster."""


class Inbox:
    """The inbox of pulls, one after another."""

    def __init__(self, connection: Connection, subject: str) -> None:
        self._connection = connection
        self.subject = subject
        self._subscription: Subscription | None = None
        self._give_back: Callable[[list[Found]], None] | None = None
        self._queue = ""  # whose messages the present pull is for
        self._number = 0  # of the present pull
        self._status: str | None = None
        self._wanted = 0
        self._messages: list[Found] = []
        self._on_message: Callable[[Found], None] | None = None
        self._complete: asyncio.Future[str | None] | None = None
        self._ending: asyncio.TimerHandle | None = None  # the last message may have ended the answer
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, connection: Connection) -> Inbox:
        """Subscribe to a new inbox."""
        inbox = cls(connection, connection.new_inbox())
        inbox._subscription = await connection.subscribe(f"{inbox.subject}.*", inbox._receive)
        return inbox

    async def pull(
        self,
        queue: str,
        subject: str,
        request: dict[str, object],
        wanted: int,
        on_message: Callable[[Found], None] | None = None,
        *,
        is_gone: Callable[[], Awaitable[bool]] | None = None,
        after: float = 0.0,
    ) -> tuple[list[Found], str | None]:
        """Send *request* to *subject*, for messages of *queue*.

        Return up to *wanted* messages, and the status that ended the answer, if any. After ``ENDED``, the inbox must be
        abandoned.

        With *on_message*, that is called for each message as it comes, before any later answer is looked at. With
        *is_gone*, that is asked once if the pull still has to wait *after* so many seconds.

        Raises:
            NoJetStream: There is no such consumer.
            Disconnected: The connection was lost before all had come.
            NotPermitted: The server does not permit to publish to *subject*.
        """
        self._queue, self._wanted, self._messages, self._on_message = queue, wanted, [], on_message
        self._number += 1
        self._status = None
        complete = self._complete = asyncio.get_running_loop().create_future()
        looking = None if is_gone is None else asyncio.create_task(_end_if_gone(complete, is_gone, after))
        lost = self._connection.when_lost(lambda: self._end(None))
        refused = self._connection.when_refused(subject, self._fail)
        try:
            reply = f"{self.subject}.{self._number}"
            await self._connection.publish(subject, json.dumps(request).encode(), reply=reply)
            status = await complete
        finally:
            self._end_later(None)
            lost()
            refused()
            if looking is not None:
                looking.cancel()
        if len(self._messages) < self._wanted:
            self._connection.check()
        if status == NO_RESPONDERS and not self._messages:
            raise NoJetStream(subject)
        messages, self._messages, self._complete = self._messages, [], None
        return messages, status

    def abandon(self, give_back: Callable[[list[Found]], None], *, is_spread: bool) -> None:
        """Pass what has come, and what still comes, to *give_back*; close the inbox, after a while if it *is_spread*.

        Else the present pull would have the next messages of the queue for as long as it was to wait.
        """
        self._give_back, self._complete = give_back, None
        messages, self._messages = self._messages, []
        if messages and self._on_message is None:  # also those that came since the pull was given up
            give_back(messages)
        asyncio.get_running_loop().call_later(LINGER if is_spread else 0.0, self._close)

    def _close(self) -> None:
        if self._subscription is not None and not self._connection.is_lost:
            self._closing = asyncio.ensure_future(self._connection.unsubscribe(self._subscription))

    def _receive(self, message: Msg) -> None:
        status = status_of(message) if not message.data else None
        if status is not None and not message.reply:
            if message.subject == f"{self.subject}.{self._number}":
                self._note(status, message)
            return
        found = delivered_message(self._queue, message)
        if found is None:
            return
        if self._give_back is not None:
            self._give_back([found])
            return
        self._messages.append(found)
        if self._on_message is not None:
            self._on_message(found)
        self._end_later(None if message.data or message.headers else EMPTY_WAIT)
        if len(self._messages) >= self._wanted:
            self._end(self._status)

    def _end_later(self, seconds: float | None) -> None:
        """Take the answer for ended if nothing comes within *seconds*; None if what came last doesn't end it."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if seconds is not None:
            self._ending = asyncio.get_running_loop().call_later(seconds, self._end, ENDED)

    def _note(self, status: str, message: Msg) -> None:
        """Note that fewer messages come than were wanted, or no more."""
        headers = message.headers or {}
        if status == HEARTBEAT:
            return
        self._status = status if status == NO_RESPONDERS else f"{status} {headers.get('Description', '')}".strip()
        missing = read_or(digits, headers.get(PENDING), None)
        self._wanted = len(self._messages) if missing is None else self._wanted - missing
        if len(self._messages) >= self._wanted:
            self._end(self._status)

    def _fail(self, error: Exception) -> None:
        if self._complete is not None and not self._complete.done():
            self._complete.set_exception(error)

    def _end(self, status: str | None) -> None:
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(status)


async def _end_if_gone(
    complete: asyncio.Future[str | None], is_gone: Callable[[], Awaitable[bool]], after: float
) -> None:
    """End a pull that still waits *after* so many seconds if its consumer is gone."""
    await asyncio.sleep(after)
    if await is_gone() and not complete.done():
        complete.set_exception(NoJetStream())


class Inboxes:
    """The inboxes of one connection that are free for the next pull."""

    def __init__(self) -> None:
        self._free: dict[Connection, list[Inbox]] = {}

    async def take(self, connection: Connection) -> Inbox:
        """Return an inbox that no pull uses."""
        for lost in [one for one in list(self._free) if one.is_lost]:  # a copy: other loops add theirs meanwhile
            self._free.pop(lost, None)
        free = self._free.get(connection)
        return free.pop() if free else await Inbox.open(connection)

    def put_back(self, connection: Connection, inbox: Inbox) -> None:
        """Let another pull use *inbox*, whose pull was answered completely."""
        self._free.setdefault(connection, []).append(inbox)
