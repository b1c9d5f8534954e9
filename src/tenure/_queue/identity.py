"""How messages, sessions and dead letters are named: ids that a broker makes up, partitions of a key."""

from __future__ import annotations

import re
from collections.abc import Collection
from zlib import crc32

from tenure._queue.checks import (
    DEAD_SUFFIX,
    check_collection,
    check_count,
    check_encodable,
    check_sequences,
    check_text,
)
from tenure.errors import ConfigError

ID_MARK = "--"
"""Stands in an id that a broker makes up, before the message's sequence: ``orders--17``. No shell treats it specially,
and a sender would hardly write it. Ids are made up when messages are read, so those that an older
version has sent have one, too."""

_FORMER_ID = re.compile(r"(.+)\$([0-9]+)", re.DOTALL)
"""How ids were made up before: ``orders$17``."""

_MADE_UP_ID = re.compile(rf"(.+){ID_MARK}([0-9]+)", re.DOTALL)


def chosen(
    ids: Collection[str] | None, sequences: Collection[int] | None
) -> tuple[frozenset[str] | None, frozenset[int] | None]:
    """Return which messages *ids* mean, in whatever form they were noted, and *sequences*; None where none are given.

    Raises:
        ConfigError: One of them can't be the id, or the sequence, of a message.
    """
    check_collection("ids", ids)
    check_collection("sequences", sequences)
    for one in ids or ():
        check_text("an id", one)
    check_sequences("a sequence", sequences or ())
    return (
        None if ids is None else frozenset(name for one in ids for name in names_of(one)),
        None if sequences is None else frozenset(sequences),
    )


def partition_of(key: str | bytes, partitions: int) -> str:
    """Return the session that *key* falls into when a queue is cut into so many *partitions*, in every process alike.

    Messages of one key keep their order, different partitions are worked on at the same time, for any number of
    consumers::

        await queue.send(body, session=partition_of(customer, 16))

    The partitions of :meth:`tenure.Backend.partitions` have the same names, so that each session can be received by the
    process that owns its partition.
    """
    return numbered_partition(partition_number(key, partitions))


def numbered_partition(number: int) -> str:
    """Return the name of a partition that has a number only."""
    return f"partition-{number}"


def partition_number(key: str | bytes, partitions: int) -> int:
    """Return the number of the partition that *key* falls into: its CRC-32, as librdkafka's ``consistent`` has it."""
    check_count("partitions", partitions)
    if isinstance(key, str):
        check_encodable("key", key)
        key = key.encode()
    if not isinstance(key, bytes):
        raise ConfigError(f"key must be text or bytes, not {key!r:.80}; try str(…)")
    return crc32(key) % partitions


def names_of(id_: str) -> tuple[str, ...]:
    """Return the ids of a message that was noted as *id_*: that, and its present form."""
    former = _FORMER_ID.fullmatch(id_)
    return (id_, f"{former[1]}{ID_MARK}{former[2]}") if former else (id_,)


def spellings_of(id_: str) -> tuple[str, ...]:
    """Return the ids that an older version or this one may have noted for a message whose id is *id_*."""
    made_up = _MADE_UP_ID.fullmatch(id_)
    return (id_, f"{made_up[1]}${made_up[2]}") if made_up else names_of(id_)


def dead_letters_of(queue: str) -> str:
    """Return the name under which the dead letters of *queue* are received."""
    return queue + DEAD_SUFFIX
