"""Frames and their seal: the byte stream between two members. No I/O: bytes in, messages out.

::

    greeting   magic (8) · nonce (16)                     each side, once, in clear
    frame      length (4) · mac (32) · counter (8) · body  length counts what follows it

House rules:

- Every frame is sealed by HMAC-SHA256 under a key of its own connection and direction, which both sides derive from the
  shared key, the two nonces and the fleet's terms. So a frame recorded on another connection, or in the other
  direction, is invalid; members that differ about the fleet's terms can't talk; and no clock is needed.
- Within a connection, the counter rises by exactly one. TCP keeps the order, so any other counter is a replay, or a gap
  that an attacker made: the window is one frame wide.
- The first frame names its sender and the member it is meant for, so a member that is reached under another's address
  finds out.
- A forged, replayed, oversized or malformed frame is counted and dropped, and changes nothing. A length that is out of
  bounds ends the connection, because the beginning of the next frame is unknown; so do too many bad frames.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NoReturn

from tenure._backends.peers.transport import Counts
from tenure._backends.peers.wire import FRAME_MAX, Malformed

MAGIC = b"tenure\x00\x01"
NONCE = 16
GREETING = len(MAGIC) + NONCE
BAD_FRAMES_MAX = 16
"""Bad frames after which a connection is closed."""

_HEAD = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_MAC = 32
_LEAST = _MAC + _COUNTER.size
_KEY = struct.Struct(">H")
INTRODUCTION = _LEAST + 2 * _KEY.size
"""Bytes of the first frame, after its length."""


class Broken(Exception):
    """A connection can't be used any further."""


class SharedKey:
    """The shared key, bound to the fleet's terms; never shown."""

    __slots__ = ("key",)

    def __init__(self, key: bytes) -> None:
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedKey) and hmac.compare_digest(self.key, other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled: what is written may be read by others")

    @classmethod
    def of(cls, key: bytes, terms: str) -> SharedKey:
        """Bind *key* to the fleet's *terms*."""
        return cls(hmac.digest(key, b"tenure peers 1\0" + terms.encode(), hashlib.sha256))

    def __repr__(self) -> str:
        return "SharedKey(***)"

    def latest(self) -> tuple[SharedKey, ...]:
        """Return this key, which stays the same."""
        return (self,)

    def channel(self, mine: bytes, theirs: bytes, *, dialled: bool) -> Channel:
        """Return the channel of one connection, given both nonces and whether this side dialled."""
        both = mine + theirs if dialled else theirs + mine
        there, back = (hmac.digest(self.key, way + both, hashlib.sha256) for way in (b">", b"<"))
        return Channel(*((there, back) if dialled else (back, there)))


class Channel:
    """One connection after the greetings: seals outgoing frames, opens incoming ones."""

    def __init__(self, out_key: bytes, in_key: bytes) -> None:
        self._out_key = out_key
        self._in_key = in_key
        self._sent = 0
        self._received = 0
        self._bad_frames = 0

    def seal(self, body: bytes) -> bytes:
        """Return the frame that carries *body*."""
        signed = _COUNTER.pack(self._sent) + body
        self._sent += 1
        mac = hmac.digest(self._out_key, signed, hashlib.sha256)
        return _HEAD.pack(_MAC + len(signed)) + mac + signed

    def has_sealed(self, frame: bytes) -> bool:
        """Return whether the other side has sealed *frame* (without its length) with the key of this channel."""
        return hmac.compare_digest(hmac.digest(self._in_key, frame[_MAC:], hashlib.sha256), frame[:_MAC])

    def open(self, frame: bytes, counts: Counts) -> bytes | None:
        """Return the body of *frame* (without its length), or None for one that is dropped.

        Raises:
            Broken: There were too many bad frames.
        """
        signed = frame[_MAC:]
        if not self.has_sealed(frame):
            self.drop("forged", counts)
            return None
        (counter,) = _COUNTER.unpack_from(signed)
        if counter != self._received:
            self.drop("replayed", counts)
            return None
        self._received += 1
        return signed[_COUNTER.size :]

    def drop(self, why: str, counts: Counts) -> None:
        """Count a frame that is dropped.

        Raises:
            Broken: There were too many.
        """
        counts.drop(why)
        self._bad_frames += 1
        if self._bad_frames >= BAD_FRAMES_MAX:
            raise Broken("too many bad frames")


def length_of(head: bytes, counts: Counts) -> int:
    """Return how many bytes follow the length in *head*.

    Raises:
        Broken: More than a frame may have, or fewer than it must have.
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
    """Return the first bytes that each side sends."""
    return MAGIC + nonce


def nonce_of(said: bytes, counts: Counts) -> bytes:
    """Return the nonce of a greeting.

    Raises:
        Broken: It is no greeting of this protocol.
    """
    if not said.startswith(MAGIC):
        counts.drop("foreign")
        raise Broken("the other side does not speak this protocol")
    return said[len(MAGIC) :]


def introduction(me: int | None, to: int) -> bytes:
    """Return the body of the first frame: its sender, and the member it is meant for."""
    return _KEY.pack(0xFFFF if me is None else me) + _KEY.pack(to)


def introduced(body: bytes, me: int, size: int) -> int | None:
    """Return which member sent an introduction, None for a client.

    Raises:
        Malformed: It is meant for another member, or its sender is no member of the fleet.
    """
    if len(body) != 2 * _KEY.size:
        raise Malformed("not an introduction")
    sender, to = _KEY.unpack(body[:2])[0], _KEY.unpack(body[2:])[0]
    if to != me or sender == me:
        raise Malformed("meant for another member")
    if sender == 0xFFFF:
        return None
    if sender >= size:
        raise Malformed("not a member")
    return int(sender)
