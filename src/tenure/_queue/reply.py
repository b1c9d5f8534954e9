"""``Reply``: the answer to a message, as its handler returns it."""

from __future__ import annotations

from tenure._queue.message import Headers
from tenure._queue.outgoing import NOT_GIVEN, Outgoing, SendOptions, outgoing


class Reply:
    """The answer to a message. A handler that returns it completes the message and sends the answer, in one step.

    If the sender of the message expects no answer, the message is completed, and nothing is sent. The same answer is
    sent by ``message.reply(…)``, which a handler in a process can't call.

    Args:
        body: The content, as bytes.
        json: Instead of *body*: a value to be sent as JSON.
        headers: As for ``Queue.send``.

    Raises:
        ConfigError: Both are given, or the value can't be written as JSON.

    Example::

        async def price(message: tenure.Message) -> tenure.Reply:
            return tenure.Reply(json={"price": 12.5})
    """

    __slots__ = ("outgoing",)

    def __init__(self, body: bytes = b"", *, json: object = NOT_GIVEN, headers: Headers | None = None) -> None:
        options: SendOptions = {} if headers is None else {"headers": headers}
        self.outgoing: Outgoing = outgoing(body, json, options)
        """The answer, without its address."""

    def __repr__(self) -> str:
        return f"<Reply, {len(self.outgoing.body)} bytes>"
