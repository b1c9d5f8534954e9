"""Schedules: those of a queue are the state of one session, in an entity that tenure has for that alone.

The metadata of a queue's own entity is too small, and is replaced without a condition. The state of a session is read
and written only under its lock, by one process at a time; no message is ever sent to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar

from tenure._backends.servicebus.administration import Administration, NoRights
from tenure._backends.servicebus.client import LOST, NO_SESSION, Namespace
from tenure._backends.servicebus.codec import state_in
from tenure._backends.servicebus.driver import NOT_FOUND, Refused
from tenure._backends.servicebus.links import ReceiveLink
from tenure._backends.servicebus.names import SCHEDULES, Path, home_of
from tenure._backends.servicebus.places import Places, no_rights
from tenure._foreign import Unreadable, a_text, read_object, read_or
from tenure._queue.broker import Schedules
from tenure._queue.schedule_steps import Act
from tenure._runtime.remote_clock import RemoteClock
from tenure.errors import ConfigError

T = TypeVar("T")

LOCK = 10.0
"""Seconds for which a session is locked whose process has vanished, at most."""

RETRY = 0.2
"""Seconds after which a session that another process has locked is asked for again, at most."""

WAIT = 5.0
"""Seconds that the service may take to lock a session."""

STATE_MAX = 4_194_304
"""Bytes of the longest state that is read: thousands of schedules."""

_PATH = Path(SCHEDULES)


class UnreadableState(ConfigError):
    """What is kept of the schedules of a queue is unreadable."""


class ServiceBusSchedules:
    """A ``ScheduleStore`` in the states of sessions. All of it runs on the library's thread."""

    def __init__(
        self,
        namespace: Namespace,
        places: Places,
        administration: Administration,
        clock: RemoteClock,
    ) -> None:
        self._namespace = namespace
        self._places = places
        self._administration = administration
        self._clock = clock
        self._told = 0.0  # the latest time that was told

    async def kept(self, queue: str) -> Schedules:
        """Return the texts that are kept of the schedules of *queue*."""

        async def read() -> Schedules:
            await self._places.existing(queue)  # so that the service's clock is known
            try:
                async with self._locked(queue) as link:
                    texts = await self._read(queue, link)
            except Refused as refused:
                if refused.condition != NOT_FOUND:
                    raise
                texts = {}
            return Schedules(texts, self._now())

        return await self._namespace.run(read)

    async def texts(self, queue: str) -> Mapping[str, str] | None:
        """Return the texts that are kept of *queue*, for ``forget``; None if they are unreadable."""
        try:
            return (await self.kept(queue)).records
        except UnreadableState:
            return None

    async def change(self, queue: str, schedule: str, act: Act[T]) -> T:
        """Replace the text of one schedule by that of *act*; create the entities first that are missing."""

        async def change() -> T:
            await self._places.existing(queue)  # so that the service's clock is known
            while True:  # until the request times out
                try:
                    async with self._locked(queue) as link:
                        return await self._change(queue, link, schedule, act)
                except Refused as refused:
                    if refused.condition == NOT_FOUND:
                        await self._create()
                    elif refused.condition not in LOST:
                        raise

        return await self._namespace.run(change)

    async def forget(self, queue: str, texts: Mapping[str, str] | None) -> None:
        """Forget those of *texts* that are still kept of *queue*, which was deleted. On the library's thread.

        None: they were unreadable, and are forgotten if they still are.
        """
        async with self._locked(queue) as link:
            try:
                kept = await self._read(queue, link)
            except UnreadableState:
                await self._write(queue, link, {})
                return
            left = {schedule: text for schedule, text in kept.items() if (texts or {}).get(schedule) != text}
            if left != kept:
                await self._write(queue, link, left)

    async def _change(self, queue: str, link: ReceiveLink, schedule: str, act: Act[T]) -> T:
        texts = await self._read(queue, link)
        kept = texts.get(schedule)
        text, answer = act(kept, self._now())
        if text != kept:
            if not texts:
                await self._places.ensure(queue)
            others = {name: one for name, one in texts.items() if name != schedule}
            await self._write(queue, link, others if text is None else {**others, schedule: text})
        return answer

    def _now(self) -> float:
        """Return the service's time; it doesn't go back when the estimate becomes a little better."""
        now = self._clock.now()
        self._told = self._told if 0.0 < self._told - now < 1.0 else now
        return self._told

    @asynccontextmanager
    async def _locked(self, queue: str) -> AsyncIterator[ReceiveLink]:
        """Lock the session of *queue*, and unlock it again."""
        link = await self._lock(queue)
        try:
            yield link
        finally:
            await self._namespace.end_session(link)

    async def _lock(self, queue: str) -> ReceiveLink:
        while True:  # until the request times out
            try:
                return await self._namespace.session(_PATH, _session_of(queue), WAIT)
            except Refused as refused:
                if refused.condition not in NO_SESSION:
                    raise
            await asyncio.sleep(random.uniform(RETRY / 4, RETRY))

    async def _read(self, queue: str, link: ReceiveLink) -> dict[str, str]:
        state = state_in(await self._ask(queue, link, "get-session-state", {}))
        if state is None:
            return {}
        try:
            return _texts(state)
        except Unreadable as error:
            raise UnreadableState(
                f"the schedules of {queue!r} can't be read: the state of the session {_session_of(queue)!r} of "
                f"{SCHEDULES!r} was written by another program ({error}); set it to nothing, and they begin anew"
            ) from None

    async def _write(self, queue: str, link: ReceiveLink, texts: dict[str, str]) -> None:
        state = bytearray(json.dumps(texts, ensure_ascii=False).encode()) if texts else None
        await self._ask(queue, link, "set-session-state", {"session-state": state})

    async def _ask(self, queue: str, link: ReceiveLink, operation: str, body: dict[str, Any]) -> Any:
        return await self._namespace.ask(_PATH, operation, {"session-id": _session_of(queue), **body}, link)

    async def _create(self) -> None:
        """Create the entity of the sessions."""
        if not self._namespace.options.create:
            raise ConfigError(
                f"{self._namespace.url} has no queue {SCHEDULES!r}, in which tenure keeps schedules; create it in the "
                "portal, with sessions, or connect with ?create=yes"
            )
        options = {
            "requires_session": True,
            "lock_duration": timedelta(seconds=LOCK),
            "user_metadata": "the schedules of tenure, as states of sessions; it has no messages",
        }
        try:
            await self._administration.create(SCHEDULES, options)
        except NoRights:
            raise no_rights(self._namespace, f"creating {SCHEDULES!r} (?create=yes)") from None


def _texts(state: bytes) -> dict[str, str]:
    """Return the texts of schedules in a state. Of one that is none, its JSON: its reader says what is wrong."""
    kept = read_object(state, STATE_MAX)
    texts = {schedule: read_or(a_text, one, None) or json.dumps(one) for schedule, one in kept.items()}
    return {schedule: text for schedule, text in texts.items() if read_or(a_text, schedule, None)}


def _session_of(queue: str) -> str:
    """Return the session of *queue*: its entity may be written in other letters, and is the same."""
    return hashlib.sha256(home_of(queue).lower().encode()).hexdigest()[:40]
