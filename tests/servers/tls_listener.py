"""A listener that gets no further than the TLS handshake, and notes what its clients say outside it.

It stands in for the server of any store: most begin with the handshake, PostgreSQL and NATS with a few bytes before.
"""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

Protocol = Literal["tls", "postgres", "nats"]

_SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
_TLS_BEGINS = b"\x16\x03"
_INFO = b'INFO {"server_id":"a","version":"2.10.0","proto":1,"max_payload":1048576,"headers":true%s}\r\n'


class TlsListener:
    """Accepts connections until it is closed.

    Args:
        protocol: What comes before the handshake.
        certificate: The server's certificate and its key; None for a server without TLS.
        demands: The authority of the certificates that clients must show; None: they need none.
        plain_answer: What a server without TLS answers to a handshake, before it closes the connection.
    """

    def __init__(
        self,
        protocol: Protocol,
        certificate: tuple[Path, Path] | None,
        *,
        demands: Path | None = None,
        plain_answer: bytes = b"",
    ) -> None:
        self._protocol = protocol
        self._plain_answer = plain_answer
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(*certificate)
            if demands is not None:
                self._context.load_verify_locations(demands)
                self._context.verify_mode = ssl.CERT_REQUIRED
        self.told: list[bytes] = []
        """What clients have said in the clear, or by TLS after a handshake that they accepted."""
        self.handshakes = 0
        """How many connections have begun a handshake."""
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10.0)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                made, _ = self._listening.accept()
                with self._lock:
                    self._open.add(made)
                serving = threading.Thread(target=self._serve, args=(made,), daemon=True)
                self._threads.append(serving)
                serving.start()

    def _serve(self, made: socket.socket) -> None:
        try:
            with suppress(OSError):
                self._talk(made)
        finally:
            with self._lock:
                self._open.discard(made)
            made.close()

    def _talk(self, made: socket.socket) -> None:
        if self._protocol == "nats":
            made.sendall(_INFO % (b',"tls_required":true' if self._context else b""))
        elif self._protocol == "postgres":
            begin = made.recv(8, socket.MSG_WAITALL)
            if begin != _SSL_REQUEST:
                self._note(begin)
                return
            made.sendall(b"S" if self._context else b"N")
        begin = made.recv(5, socket.MSG_PEEK)
        if not begin.startswith(_TLS_BEGINS):
            self._note(made.recv(1_000))
            return
        self.handshakes += 1
        if self._context is None:
            made.recv(100_000)
            made.sendall(self._plain_answer)
            return
        try:
            with self._context.wrap_socket(made.dup(), server_side=True) as encrypted:
                self._note(encrypted.recv(1_000))
        except ssl.SSLError:
            # The alert is lost if the connection is closed while something of the client's is unread.
            made.shutdown(socket.SHUT_WR)
            while made.recv(10_000):
                pass

    def _note(self, said: bytes) -> None:
        if said:
            self.told.append(said)
