"""Messages of other programs on NATS, byte for byte as they are given."""

from __future__ import annotations

from nats.aio.client import Client

ANSWERED_WITHIN = 30  # seconds, for a busy machine


async def flush(client: Client) -> None:
    """Return once the server has read what was sent, and what it sent before has arrived."""
    # By itself, the driver's flush sends its PING before what waits to be sent.
    await client._flush_pending(force_flush=True)
    await client.flush()


async def publish(client: Client, subject: bytes, headers: bytes, body: bytes, reply: bytes = b"") -> None:
    """Send a message; return once the server has read it."""
    sizes = f"{len(headers)} {len(headers) + len(body)}".encode()
    await client._send_command(b"HPUB %s %s %s\r\n%s%s\r\n" % (subject, reply, sizes, headers, body))
    await flush(client)


async def store(client: Client, subject: bytes, headers: bytes, body: bytes) -> None:
    """Send a message to a stream; return once it is stored."""
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await publish(client, subject, headers, body, inbox.encode())
    answer = await answers.next_msg(ANSWERED_WITHIN)
    assert b'"seq":' in answer.data, answer.data
    await answers.unsubscribe()
