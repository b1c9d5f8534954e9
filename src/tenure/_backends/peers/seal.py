"""Frames and their seal: what a stream of bytes between two members looks like. No I/O: bytes in, messages out.

::

    greeting   magic (8) · nonce (16)                     each side, once, in clear
    frame      length (4) · mac (32) · counter (8) · body  length counts what follows it

House rules:

- Every frame is sealed by HMAC-SHA256 under a key of its own connection and direction, which both derive from the
  shared key, the two nonces and the fleet's terms. So a frame recorded on one connection, or in the other direction, is
  no frame here; members that differ about the fleet's terms can't talk; and no clock is needed.
- Within a connection, the counter rises by exactly one. TCP keeps the order, so that any other counter is a replay, or
  a gap that somebody made: the window is one frame wide.
- The first frame names who speaks to whom. A member that was reached under another's address finds out there.
- What is forged, replayed, oversized or malformed is counted, dropped, and changes nothing. A length that is out of
  bounds ends the connection, for where the next frame begins is not known any more; so does too much rubbish.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from tenure._backends.peers.transport import Counts
from tenure._backends.peers.wire import FRAME_MAX, Malformed

MAGIC = b"tenure\x00\x01"
NONCE = 16
GREETING = len(MAGIC) + NONCE
RUBBISH_MAX = 16
"""So many bad frames on one connection end it."""

_HEAD = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_MAC = 32
_LEAST = _MAC + _COUNTER.size
_KEY = struct.Struct(">H")


class Broken(Exception):
    """Say that a connection can't be used any further."""


@dataclass(frozen=True, slots=True)
class Secret:
    """The shared key, bound to what the members must agree on; never shown."""

    key: bytes

    @classmethod
    def of(cls, key: bytes, terms: str) -> Secret:
        """Bind *key* to the fleet's *terms*."""
        return cls(hmac.digest(key, b"tenure peers 1\0" + terms.encode(), hashlib.sha256))

    def __repr__(self) -> str:
        return "Secret(***)"

    def channel(self, mine: bytes, theirs: bytes, *, dialled: bool) -> Channel:
        """Return the channel of one connection, given both nonces and who dialled."""
        both = mine + theirs if dialled else theirs + mine
        there, back = (hmac.digest(self.key, way + both, hashlib.sha256) for way in (b">", b"<"))
        return Channel(*((there, back) if dialled else (back, there)))


class Channel:
    """One connection after the greetings: seals what goes out, opens what comes in."""

    def __init__(self, out_key: bytes, in_key: bytes) -> None:
        self._out_key = out_key
        self._in_key = in_key
        self._sent = 0
        self._received = 0
        self._rubbish = 0

    def seal(self, body: bytes) -> bytes:
        """Return the frame that carries *body*."""
        told = _COUNTER.pack(self._sent) + body
        self._sent += 1
        mac = hmac.digest(self._out_key, told, hashlib.sha256)
        return _HEAD.pack(_MAC + len(told)) + mac + told

    def open(self, frame: bytes, counts: Counts) -> bytes | None:
        """Return the body of *frame* (without its length), or None for one that is dropped.

        Raises:
            Broken: There has been too much rubbish.
        """
        told = frame[_MAC:]
        if not hmac.compare_digest(hmac.digest(self._in_key, told, hashlib.sha256), frame[:_MAC]):
            self.drop("forged", counts)
            return None
        (counter,) = _COUNTER.unpack_from(told)
        if counter != self._received:
            self.drop("replayed", counts)
            return None
        self._received += 1
        return told[_COUNTER.size :]

    def drop(self, why: str, counts: Counts) -> None:
        """Count what is not handled, and give up when it is too much.

        Raises:
            Broken: There has been too much of it.
        """
        counts.drop(why)
        self._rubbish += 1
        if self._rubbish >= RUBBISH_MAX:
            raise Broken("too many bad frames")


def length_of(head: bytes, counts: Counts) -> int:
    """Return how many bytes follow the four of *head*.

    Raises:
        Broken: More than a frame may have, or fewer than one has.
    """
    (length,) = _HEAD.unpack(head)
    if length > FRAME_MAX - _HEAD.size:
        counts.drop("oversized")
        raise Broken("a frame was longer than any may be")
    if length < _LEAST:
        counts.drop("malformed")
        raise Broken("a frame was shorter than any is")
    return int(length)


def greeting(nonce: bytes) -> bytes:
    """Return what each side says first."""
    return MAGIC + nonce


def nonce_of(said: bytes, counts: Counts) -> bytes:
    """Return the nonce of a greeting.

    Raises:
        Broken: It is none of ours.
    """
    if not said.startswith(MAGIC):
        counts.drop("stranger")
        raise Broken("whoever is there does not speak our language")
    return said[len(MAGIC) :]


def introduction(me: int | None, to: int) -> bytes:
    """Return the body of the first frame: who speaks to whom."""
    return _KEY.pack(0xFFFF if me is None else me) + _KEY.pack(to)


def introduced(body: bytes, me: int, size: int) -> int | None:
    """Return which member speaks to us, None for one who only looks on.

    Raises:
        Malformed: It means somebody else, or is nobody of the fleet.
    """
    if len(body) != 2 * _KEY.size:
        raise Malformed("not an introduction")
    who, to = _KEY.unpack(body[:2])[0], _KEY.unpack(body[2:])[0]
    if to != me or who == me:
        raise Malformed("meant for another member")
    if who == 0xFFFF:
        return None
    if who >= size:
        raise Malformed("no member")
    return int(who)
