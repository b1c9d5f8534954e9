"""Which of several messages the server has refused, where it has only closed their channel.

It takes the messages of a channel in order. So those before the one that it refuses are taken, confirmed or not, and
those behind it are not. Which one it is, a second try tells, of each alone, to a routing key that leads nowhere: the
server looks at a message before it routes it, so a try keeps nothing.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from tenure._backends.rabbitmq.connection import AmqpChannel, Published
from tenure._backends.rabbitmq.errors import AmqpError, ChannelLost, NotTaken, Rejected
from tenure._backends.rabbitmq.names import PROBE
from tenure._redaction import redacted

_TOO_LARGE = re.compile(r"message size \d+ (?:is )?larger than (?:configured )?max size (\d+)")
_OF_ITS_EXCHANGE = (403, 404)
"""Codes that are not for what a message contains, but for a right or an exchange."""


def largest_body(error: AmqpError) -> int | None:
    """Return the size that the server has told as the largest that it takes; None if it has refused something else."""
    found = _TOO_LARGE.search(error.text)
    return None if found is None else int(found[1])


def too_large(body: bytes, most: int) -> str:
    """Return what is wrong with a *body* of more than *most* bytes."""
    return (
        f"body ({len(body):,} bytes) must not be larger than the server's max_message_size ({most:,} bytes); send a "
        "reference to it, or raise that on the server"
    )


async def find_rejected(
    error: AmqpError, sent: Sequence[Published], open_channel: Callable[[], Awaitable[AmqpChannel]]
) -> int | None:
    """Return the index of the message for which the server has closed a channel with *error*; None if it isn't known.

    Args:
        error: Why the channel is over.
        sent: What was not confirmed on it, in order.
        open_channel: Opens another one, with confirms.

    Raises:
        AmqpError: There is no connection.
    """
    most = largest_body(error)
    if most is not None:
        return next((index for index, one in enumerate(sent) if len(one.body) > most), None)
    channel = await open_channel()
    try:
        for index, one in enumerate(sent):
            try:
                await channel.publish(one.exchange, PROBE, one.properties, one.body, mandatory=False)
            except ChannelLost as again:
                if not again.code:
                    raise
                return index if (again.code, again.text) == (error.code, error.text) else None
        return None
    finally:
        channel.begin_close()


def outcomes(error: AmqpError, sent: Sequence[Published], rejected: int | None) -> list[Exception]:
    """Return what is known of each of the messages *sent*, where that at *rejected* was refused with *error*."""
    if rejected is None:
        text = f"the server has closed the channel for one of several messages, and it is not known for which: {error}"
        return [ChannelLost(0, text) for _ in sent]
    found: list[Exception] = []
    most, exchange = largest_body(error), sent[rejected].exchange
    for index, one in enumerate(sent):
        if index < rejected:
            text = f"the server has closed the channel for another message ({error}), and this one may be kept or not"
            found.append(ChannelLost(0, text))
        elif most is not None and len(one.body) > most:
            found.append(Rejected(too_large(one.body, most)))
        elif error.code in _OF_ITS_EXCHANGE and one.exchange == exchange:
            found.append(error)
        elif index == rejected:
            found.append(Rejected(redacted(error.text)))
        else:
            found.append(NotTaken(0, f"the server had closed the channel for another message: {error}"))
    return found
