"""Messages of other programs on NATS, byte for byte as they are given."""

from __future__ import annotations

import json
from typing import Any

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


async def api(client: Client, path: str, body: object = None) -> dict[str, Any]:
    """Return JetStream's answer to a request of an administrator."""
    data = b"" if body is None else json.dumps(body).encode()
    answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{path}", data, timeout=ANSWERED_WITHIN)).data)
    assert "error" not in answer, answer
    return answer
