"""Requests to resign: in the record of the election, or, by a client of Curator, in the data of the leader's own node.

Both are read once, with a watch, and again only when the watch has fired.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kazoo.exceptions import NoNodeError

from tenure._backends.zookeeper.places import Place
from tenure._backends.zookeeper.records import REVOKED, is_asked, read_record
from tenure._backends.zookeeper.requests import get
from tenure._backends.zookeeper.session import Reply
from tenure.errors import ConfigError

Readings = tuple[asyncio.Future[Reply] | None, asyncio.Future[Reply] | None]
"""The requests for the record of an election and for the data of our own node; None for what is known."""


def resign_asked(place: Place) -> bool:
    """Return whether the holder of a place was asked to step down."""
    return place.is_revoked or (place.record is not None and is_asked(place.record[0], place.token))


async def read_flags(place: Place, until: float) -> None:
    """Read what a watch has reported as changed; see ``note_readings`` for the errors."""
    await place.session.connected(until)
    await note_readings(place, send_readings(place), until)


def send_readings(place: Place, *, anew: bool = False) -> Readings:
    """Send the requests for what a watch has reported as changed; there must be a connection.

    With *anew*, read the record in any case: the request before this one changes it.
    """
    session, path = place.session, place.path
    record = own = None
    watched = "record", path
    if anew or place.record is None or not session.is_armed(watched):
        record = session.send(get(path, session.watcher(watched, place.name, anew=anew)), arms=watched)
    if place.node is not None and not session.is_armed(watched := ("own", place.node_path)):
        own = session.send(get(place.node_path, session.watcher(watched, place.name)), arms=watched)
    return record, own


async def note_readings(place: Place, readings: Readings, until: float) -> None:
    """Note the answers to ``send_readings``.

    Raises:
        NoNodeError: The election's node is gone.
        Unavailable: There was no answer.
        ConfigError: The election's node has data of others.
    """
    record, own = readings
    if own is not None:
        with suppress(NoNodeError):  # the write beside it says so, too
            data, _ = await place.session.answer(own, until)
            place.is_revoked = data == REVOKED
    if record is not None:
        data, stat = await place.session.answer(record, until)
        place.record = None
        found = read_record(data, place.path)
        if found is None:
            raise ConfigError(
                f"{place.path} holds data that is not tenure's ({data[:40]!r}); tenure keeps its record there, and "
                "overwrites nothing else: use another name, or another path in the URL"
            )
        place.record = found, stat.version
