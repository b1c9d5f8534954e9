"""Names in the form that Azure accepts: of blobs, of queues, and text as metadata; each can be decoded.

A name that Azure accepts is not changed, so that other programs find the blob or queue under the same name.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Mapping
from urllib.parse import unquote

from tenure._foreign import Unreadable, read_or
from tenure._queue.checks import DEAD_SUFFIX, check_name
from tenure.errors import ConfigError

BLOB_MAX = 900
"""Longer blob names are replaced by a hash; Azure allows 1,024 characters."""

LONG_PREFIX = ".long/"
"""The prefix of a hash. No other name begins with a dot, see :func:`blob_of`."""

POISON_SUFFIX = "-poison"
"""The suffix of the queue of a queue's dead letters, as in Azure Functions."""

_PLAIN = re.compile(r"[A-Za-z0-9_-]")
_QUEUE = re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,54}[a-z0-9]")
_GENERATED = re.compile(r".*-x[0-9a-f]{20}")


def blob_of(name: str) -> str:
    """Return the blob for *name*.

    ASCII letters, digits, ``-``, ``_``, and inside a part between slashes also ``.`` and spaces, are not changed; the
    bytes of everything else are written as ``~`` and two hex digits. (No ``%``: some clients decode it twice. No other
    letters: some file systems under Azure treat two encodings of ``é`` as one.)
    """
    parts = name.split("/")
    written = "/".join(map(_part, parts)) if all(parts) else _part(name)
    if len(written) <= BLOB_MAX:
        return written
    return LONG_PREFIX + hashlib.sha256(name.encode()).hexdigest()


def _part(part: str) -> str:
    last = len(part) - 1
    return "".join(
        letter if _PLAIN.match(letter) or (letter in ". " and 0 < index < last) else _escaped(letter)
        for index, letter in enumerate(part)
    )


def _escaped(letter: str) -> str:
    return "".join(f"~{byte:02X}" for byte in letter.encode())


def name_of(blob: str) -> str | None:
    """Return the name of *blob*; None if the blob is a hash, and holds the name as its content."""
    return None if blob.startswith(LONG_PREFIX) else unquote(blob.replace("%", "%25").replace("~", "%"))


def common_beginning(blobs: Collection[str]) -> str:
    """Return the longest text with which all of *blobs* begin; there must be one at least."""
    least, most = min(blobs), max(blobs)
    length = next((at for at, (one, other) in enumerate(zip(least, most, strict=False)) if one != other), len(least))
    return least[:length]


def queue_of(name: str) -> str:
    """Return Azure's name for the queue *name*.

    3 to 56 small letters, digits and single hyphens are not changed. Any other name becomes a readable part and a hash;
    the name itself is kept in the queue's metadata.
    """
    if _QUEUE.fullmatch(name) and not name.endswith(POISON_SUFFIX) and not _GENERATED.fullmatch(name):
        return name
    rest = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:33].strip("-") or "queue"
    return f"{rest}-x{hashlib.sha256(name.encode()).hexdigest()[:20]}"


def queue_name_of(queue: str, metadata: Mapping[str, str] | None) -> str:
    """Return the name of the queue that Azure calls *queue*: the one in its *metadata*, if it is called so for it."""
    name = read_or(decode_metadata, (metadata or {}).get("tenure_name", queue), queue)
    home = name.removesuffix(DEAD_SUFFIX)
    try:
        check_name(home)
    except ConfigError:
        return queue
    return name if queue == queue_of(home) + POISON_SUFFIX * name.endswith(DEAD_SUFFIX) else queue


def encode_metadata(text: str) -> str:
    """Return *text* as a value of metadata, which is an HTTP header: unchanged, or as ``=`` and base64."""
    if text.isascii() and text.isprintable() and text == text.strip() and not text.startswith("=") and text:
        return text
    return "=" + base64.b64encode(text.encode()).decode()


def decode_metadata(value: str) -> str:
    """Return the text that :func:`encode_metadata` has encoded as *value*.

    Raises:
        Unreadable: It has not encoded this one.
    """
    if not value.startswith("="):
        return value
    try:
        return base64.b64decode(value[1:], validate=True).decode()
    except ValueError:  # binascii.Error, or a UnicodeDecodeError
        raise Unreadable(f"it is no text in base64, but {value[:80]!a}") from None
