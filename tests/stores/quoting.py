"""Servers that quote the request in their refusal, with the login in it: one for each protocol.

They are no tests of how a store logs in: each answers as soon as something was sent that it can quote.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

ETCD_TOKEN = "hUsH.of.etcd.1234.hUsH"
Answer = Callable[[bytes], bytes]


def http(status: int, *, as_json: bool = True) -> Answer:
    """Quote in the reason, a header and the body, whose fields are those of etcd's and Kubernetes' refusals."""

    def answer(request: bytes) -> bytes:
        text = request.decode("latin-1")
        fields = {"message": text, "error": text, "reason": text, "code": 13, "kind": "Status", "apiVersion": "v1"}
        body = json.dumps(fields).encode() if as_json else b"<html>%s</html>" % request
        line = b" ".join(request.split())
        head = b"HTTP/1.1 %d %s\r\nx-ms-error-code: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return head % (status, line, line, len(body)) + body

    return answer


def etcd(request: bytes) -> bytes:
    """Log in with a token, and quote it."""
    if b"/auth/authenticate" not in request:
        return http(500)(request)
    body = json.dumps({"token": ETCD_TOKEN}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def redis(code: bytes, request: bytes) -> bytes:
    """Quote in an error with this code."""
    return b"-%s %s\r\n" % (code, b" ".join(request.split()))


def postgresql(request: bytes) -> bytes:
    """Ask for the password in clear text, and quote it in the text, the detail and the hint of an error."""
    if request == b"\x00\x00\x00\x08\x04\xd2\x16\x2f":
        return b"N"  # without TLS
    if request[0] == 0:
        return b"R\x00\x00\x00\x08\x00\x00\x00\x03"
    said = request[5:].strip(b"\x00")
    fields = b"SERROR\x00VERROR\x00CXX000\x00M%s\x00D%s\x00H%s\x00\x00" % (said, said, said)
    return b"E" + (len(fields) + 4).to_bytes(4, "big") + fields


def nats(request: bytes) -> bytes:
    """Quote in an ``-ERR``."""
    return b"-ERR '%s'\r\n" % request.replace(b"\r\n", b" ")


def amqp(code: int, request: bytes) -> bytes:
    """Ask for a login, and quote it in a ``Connection.Close`` with this code."""
    if request.startswith(b"AMQP"):
        start = b"\x00\x0a\x00\x0a\x00\x09" + b"\x00\x00\x00\x00" + b"\x00\x00\x00\x05PLAIN" + b"\x00\x00\x00\x05en_US"
        return _frame(start)
    said = request[request.find(b"PLAIN") :][:200]
    return _frame(b"\x00\x0a\x00\x32" + code.to_bytes(2, "big") + bytes([len(said)]) + said + b"\x00\x0a\x00\x0b")


def _frame(method: bytes) -> bytes:
    return b"\x01\x00\x00" + len(method).to_bytes(4, "big") + method + b"\xce"


def echo(request: bytes) -> bytes:
    """Answer with the request: the whole answer of a protocol that has no place for a text."""
    return request


ANSWERS: dict[str, Answer] = {
    **{f"HTTP {status}": http(status) for status in (200, 400, 401, 403, 404, 429, 500, 503)},
    "HTTP 500, no JSON": http(500, as_json=False),
    "HTTP 200, no JSON": http(200, as_json=False),
    "etcd, logged in": etcd,
    **{
        f"Redis {code}": partial(redis, code.encode()) for code in ("ERR", "NOPERM", "WRONGPASS", "MOVED 1", "LAYOUT a")
    },
    "PostgreSQL": postgresql,
    "NATS": nats,
    **{f"AMQP {code}": partial(amqp, code) for code in (320, 403, 501, 530, 541)},
    "echo": echo,
}


@asynccontextmanager
async def quoting(how: str) -> AsyncIterator[int]:
    """Start a server that quotes; yield its port."""

    answer = ANSWERS[how]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            if how == "NATS":
                writer.write(
                    b'INFO {"server_id":"x","version":"2.10.1","headers":true,"nonce":"abc","max_payload":9}\r\n'
                )
            while request := await reader.read(2**16):
                writer.write(answer(request))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
