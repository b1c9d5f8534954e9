"""Which entity the name of a queue means, and its settings."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

from azure.core.exceptions import AzureError

from tenure._backends.servicebus.administration import Administration, Entity, NoRights
from tenure._backends.servicebus.client import NO_RIGHTS, Namespace
from tenure._backends.servicebus.codec import long_of, received_in
from tenure._backends.servicebus.driver import FAILURES, NOT_FOUND, Refused
from tenure._backends.servicebus.names import SCHEDULES, Path, entity_of, home_of, may_be_subscription, subscription_of
from tenure._foreign import Unreadable, a_flag, a_list, a_text, an_object, read_object, read_or, seconds
from tenure._queue.broker import QueueOptions, QueueSettings, read_settings, undeclared
from tenure._queue.checks import DEAD_SUFFIX, check_name
from tenure._queue.generations import Generations
from tenure.errors import ConfigError, TenureError, Unavailable

LOCK_LEAST = 5.0
"""Seconds: the shortest lock that Service Bus allows. It is what is trusted where the lock can't be read."""

DELIVERIES_USUAL = 10
"""The service's own default of MaxDeliveryCount, for where it can't be read."""

SETTINGS_KEPT = 60.0
"""Seconds for which the settings that were read are used: a read costs the namespace as much as ten messages."""

MAKING = 3.0
"""Seconds for which a process waits for another one that makes a queue anew; then that one was interrupted."""

CHECK_AFTER = 0.25
"""Seconds after which to check that an entity still is as it was written, at least."""

METADATA_MAX = 1_024

_FIRST = {"from-sequence-number": long_of(1), "message-count": 1}

NATIVE = ("lock", "max_deliveries", "dedupe_window")


@dataclass(frozen=True, slots=True)
class Noted:
    """What tenure keeps in an entity's user metadata."""

    name: str | None = None
    """The queue's name, where that of the entity differs."""
    declared: tuple[str, ...] = ()
    """The settings that were declared; None of them if tenure did not create the entity."""
    body_max: int | None = None
    dead_retention: float | None = None
    idle_at: float | None = None
    is_open: bool = False
    """Whether it was only declared, so that its first use decides whether it has sessions."""
    maker: str | None = None
    """The mark of the process that is making it anew, with sessions."""
    made: str | None = None
    """What tells it from an entity of the same name that was deleted, if tenure has created it."""

    @classmethod
    def read(cls, metadata: str) -> Noted | None:
        """Return what is noted; None if tenure has noted nothing. What it can't have noted is left out."""
        try:
            found = an_object(read_object(metadata).get("tenure"))
        except Unreadable:
            return None
        settings = read_settings({name: found.get(name) for name in ("body_max", "dead_retention")})
        names = (read_or(a_text, one, None) for one in read_or(a_list, found.get("declared"), ()))
        return cls(
            read_or(a_text, found.get("name"), None),
            tuple(name for name in names if name is not None),
            settings.get("body_max"),
            _retention(settings),
            read_or(seconds, found.get("idle_at"), None),
            read_or(a_flag, found.get("open"), False),
            read_or(a_text, found.get("maker"), None),
            read_or(a_text, found.get("made"), None),
        )

    def written(self) -> str:
        """Return it as user metadata."""
        given = {
            "name": self.name,
            "declared": list(self.declared),
            "body_max": self.body_max,
            "dead_retention": self.dead_retention,
            "idle_at": self.idle_at,
            "open": self.is_open or None,
            "maker": self.maker,
            "made": self.made,
        }
        text = json.dumps({"tenure": {name: value for name, value in given.items() if value not in (None, [])}})
        if len(text) > METADATA_MAX:
            raise ConfigError("the queue's name is too long for Service Bus to keep; choose a shorter one")
        return text


class Places:
    """Names of queues, and the entities that they mean. All methods are called on the library's thread."""

    def __init__(self, namespace: Namespace, administration: Administration, generations: Generations) -> None:
        self._generations = generations
        self._namespace = namespace
        self._administration = administration
        self._paths: dict[str, Path] = {}
        self._finding: dict[str, asyncio.Lock] = {}
        self._settings: dict[str, tuple[float, QueueSettings]] = {}
        self._has_sessions: dict[str, bool] = {}
        self._dedupes: dict[str, bool] = {}
        self._decided: set[str] = set()

    @property
    def may_read(self) -> bool:
        """Whether this process has read settings, and may do so."""
        return self._administration.may_manage is True

    @property
    def known(self) -> list[str]:
        """The queues that this process has used."""
        return sorted(self._paths)

    def known_path(self, name: str) -> Path | None:
        """Return the entity of a queue if it is known; on any thread."""
        found = self._paths.get(home_of(name))
        return None if found is None else found._replace(is_dead=name.endswith(DEAD_SUFFIX))

    def known_settings(self, name: str) -> QueueSettings | None:
        """Return the settings of a queue if they were read not long ago; on any thread."""
        known = self._settings.get(home_of(name))
        return known[1] if known is not None and self._namespace.clock.now() < known[0] + SETTINGS_KEPT else None

    async def path_of(self, name: str, *, sessions: bool = False) -> Path:
        """Return the entity of a queue, or of its dead letters; create it with *sessions* or without, if it may be.

        Raises:
            ConfigError: There is none of this name, and it may not be created.
        """
        home, found = home_of(name), await self.existing(name)
        while found is None:  # until the request times out
            if not self._namespace.options.create:
                raise _missing(self._namespace, home)
            async with self._finding.setdefault(home, asyncio.Lock()):
                if home not in self._paths and await self._create(home, {}, sessions=sessions):
                    self._paths[home] = Path(entity_of(home))
                    self._decided.add(home)
            found = await self.existing(name)
            if found is None:  # another is creating it, or it was just deleted: both are refused as if it existed
                await asyncio.sleep(CHECK_AFTER)
        if home not in self._decided and self._namespace.options.create:
            await self._decide(home, found._replace(is_dead=False), sessions=sessions)
        return found

    async def ensure(self, name: str) -> None:
        """Create a queue if it is missing and may be created; its first use decides whether it has sessions."""
        if await self.existing(name) is None:
            if self._namespace.options.create:
                await self.declare(name, {}, only_undeclared=True)
            else:
                raise _missing(self._namespace, name)

    async def existing(self, name: str) -> Path | None:
        """Return the entity of a queue, or of its dead letters; None if there is none of this name."""
        home = home_of(name)
        found = self._paths.get(home)
        if found is None:
            found = await self._find(home)
            if found is None:
                return None
            self._paths[home] = found
        return found._replace(is_dead=name.endswith(DEAD_SUFFIX))

    async def _decide(self, home: str, path: Path, *, sessions: bool) -> None:
        """Decide at the first use of a queue that was only declared whether it has sessions, which can't be changed."""
        async with self._finding.setdefault(home, asyncio.Lock()):
            give_up = asyncio.get_running_loop().time() + MAKING
            while home not in self._decided:  # until the request times out
                try:
                    entity = await self._administration.find(path)
                except NoRights:
                    self._decided.add(home)
                    return
                is_late = asyncio.get_running_loop().time() > give_up
                noted = Noted.read(entity.metadata) if entity is not None else None
                if not is_late and (entity is None or (noted is not None and noted.maker is not None)):
                    await asyncio.sleep(CHECK_AFTER)  # another process is making it anew
                    continue
                if entity is None:
                    self.forget(home)
                    return
                if noted is not None and noted.is_open:
                    made = await self._make_anew(path, entity, noted) if sessions and not entity.sessions else False
                    if made is None:
                        continue
                    if not made:
                        await self._close(path, noted)
                    self._has_sessions[home] = made or entity.sessions
                self._decided.add(home)

    async def _close(self, path: Path, noted: Noted) -> None:
        """Note that it is decided whether a queue has sessions."""

        def close(entity: Entity) -> dict[str, Any]:
            changes = {"user_metadata": replace(_noted(entity, noted), is_open=False, maker=None).written()}
            if noted.maker is not None:  # one that was interrupted has left it so that nothing can be sent
                changes["status"] = "Active"
            return changes

        await self._administration.update(path, close)

    async def _make_anew(self, path: Path, entity: Entity, noted: Noted) -> bool | None:
        """Create a queue anew, with sessions, if nothing is in it.

        Nothing can be sent to it from the look until it is deleted. Of several processes, the last one that writes its
        mark goes on. Return whether that was done; None if another one is at it.
        """
        ours = replace(noted, maker=secrets.token_hex(8))

        def mark(entity: Entity) -> dict[str, Any]:
            marked = replace(_noted(entity, noted), maker=ours.maker)
            return {"user_metadata": marked.written(), "status": "SendDisabled"}

        try:
            await self._change(path, mark)
            if not await self._is_marked(path, ours):
                return None
            for each in (path, path._replace(is_dead=True)):
                if received_in(await self._namespace.ask(each, "peek-message", _FIRST)):
                    await self._close(path, ours)
                    return False
            if not await self._is_marked(path, ours):
                return None
            await self._administration.delete(path)
        except BaseException:
            restoring = asyncio.ensure_future(self._restore(path, noted, ours))
            with suppress(asyncio.CancelledError):
                await asyncio.shield(restoring)
            raise
        await self._namespace.forget(path.node)
        options = _options(settings_of(entity), replace(noted, is_open=False), sessions=True)
        while not await self._administration.create(path.entity, options):  # as while it is still being deleted
            if await self._administration.find(path) is not None:
                return None
            await asyncio.sleep(CHECK_AFTER)
        return True

    async def _is_marked(self, path: Path, ours: Noted) -> bool:
        entity = await self._administration.find(path)
        noted = Noted.read(entity.metadata) if entity is not None else None
        return noted is not None and noted.maker == ours.maker

    async def _restore(self, path: Path, noted: Noted, ours: Noted) -> None:
        """Let messages be sent again to a queue that was not made anew."""

        def unmark(entity: Entity) -> dict[str, Any]:
            unmarked = replace(_noted(entity, noted), maker=None)
            return {"user_metadata": unmarked.written(), "status": "Active"}

        with suppress(*FAILURES, NoRights, TenureError):
            async with asyncio.timeout(self._namespace.options.timeout):
                if await self._is_marked(path, ours):
                    await self._administration.update(path, unmark)

    async def is_open(self, name: str) -> bool:
        """Return whether it is not decided yet whether a queue has sessions."""
        home = home_of(name)
        path = await self.existing(home)
        if path is None or home in self._decided or not self._namespace.options.create:
            return path is None
        try:
            entity = await self._administration.find(path)
        except NoRights:
            return False
        noted = Noted.read(entity.metadata) if entity is not None else None
        if entity is None or (noted is not None and noted.is_open):
            return True
        self._decided.add(home)
        return False

    def note_sessions(self, name: str) -> None:
        """Note that a queue has sessions."""
        self._has_sessions[home_of(name)] = True

    def forget(self, name: str) -> None:
        """Look again for the entity of a queue when it is next used."""
        home = home_of(name)
        self._generations.rise(home)
        self._paths.pop(home, None)
        self._settings.pop(home, None)
        self._has_sessions.pop(home, None)
        self._dedupes.pop(home, None)
        self._decided.discard(home)

    async def has_sessions(self, name: str) -> bool:
        """Return whether a queue requires sessions, as far as this process may know."""
        home = home_of(name)
        if home not in self._has_sessions:
            await self.settings(home)
        return self._has_sessions.get(home, False)

    async def detects_duplicates(self, name: str) -> bool:
        """Return whether the service may take a message for a duplicate; it may, where that can't be read."""
        path, home = await self.existing(name), home_of(name)
        if path is None:
            return self._namespace.options.create  # one that is created then does
        if path.subscription is not None:
            return False
        with suppress(AzureError, OSError, Unavailable):
            await self.settings(home)
        return self._dedupes.get(home, True)

    async def deliveries_max(self, name: str, *, is_copy: bool) -> int | None:
        """Return after how many deliveries a message dies; None if it can't be read, as the service decides then.

        It counts a copy anew. So copies always have a limit: if need be, that of the URL, or the service's usual one.
        """
        settings = await self.settings(name)
        return settings.max_deliveries if is_copy or self.knows_deliveries else None

    @property
    def knows_deliveries(self) -> bool:
        """Whether MaxDeliveryCount was read, or given in the URL."""
        return self.may_read or self._namespace.options.max_deliveries is not None

    def lock_known(self, name: str) -> float:
        """Return the length of a queue's locks as it was read last."""
        known = self._settings.get(home_of(name))
        return LOCK_LEAST if known is None else known[1].lock

    # --- settings ---

    async def settings(self, name: str, *, fresh: bool = False) -> QueueSettings:
        """Return the settings that hold; the usual ones if there is no such queue."""
        home, now = home_of(name), self._namespace.clock.now()
        known = self._settings.get(home)
        if known is not None and not fresh and now < known[0] + SETTINGS_KEPT:
            return known[1]
        path = await self.existing(home)
        if path is None:
            return QueueSettings()
        patience = None if known is None or fresh else self._namespace.options.timeout / 4
        try:
            async with asyncio.timeout(patience):
                entity = await self._administration.find(path)
        except NoRights:
            options = self._namespace.options
            found = QueueSettings(options.lock or LOCK_LEAST, options.max_deliveries or DELIVERIES_USUAL)
        except (AzureError, OSError, Unavailable):
            if known is None or fresh:
                raise
            found = known[1]  # messages go another way, which may well be open
        else:
            if entity is None:
                self.forget(home)
                return QueueSettings()
            return self._keep_settings(home, entity)
        self._settings[home] = now, found
        return found

    def _keep_settings(self, home: str, entity: Entity) -> QueueSettings:
        """Return the settings of an entity that was read just now, and keep them, and what else is asked for often."""
        self._has_sessions[home] = entity.sessions
        self._dedupes[home] = entity.dedupe_window is not None
        self._settings[home] = self._namespace.clock.now(), settings_of(entity)
        self._generations.note(home, _noted(entity, Noted()).made)
        return self._settings[home][1]

    async def declare(self, name: str, changes: QueueOptions, *, only_undeclared: bool) -> QueueSettings:
        """Write *changes* into the settings of a queue; return those that hold then.

        An entity is changed as a whole, and without a condition. So it is read again a moment later, and written again
        if another process has written meanwhile. Of several that declare a setting at the same time, the first one
        certainly wins only on a queue that doesn't exist yet.
        """
        if not self._namespace.options.create:
            return await self._compared(name, changes, only_undeclared=only_undeclared)
        while True:  # until the request times out
            path = await self.existing(name)
            entity = None if path is None else await self._readable(path)
            if path is None or entity is None:
                self.forget(name)
                if await self._create(name, changes, sessions=False, is_open=True):
                    return await self.settings(name, fresh=True)
                continue
            declared = declared_of(entity)
            if only_undeclared:
                changes = undeclared(changes, declared)
            if all(declared.get(option) == value for option, value in changes.items()):
                return self._keep_settings(home_of(name), entity)

            def change(entity: Entity, wanted: QueueOptions = changes) -> dict[str, Any]:
                wanted = undeclared(wanted, declared_of(entity)) if only_undeclared else wanted
                return _native(wanted, entity, name)

            await self._change(path, change)

    async def _change(self, path: Path, change: Callable[[Entity], dict[str, Any]]) -> None:
        """Change an entity; return when what another process has read before is written, as far as can be told."""
        began = asyncio.get_running_loop().time()
        await self._administration.update(path, change)
        took = asyncio.get_running_loop().time() - began
        await asyncio.sleep(max(CHECK_AFTER, 4 * took))

    async def _compared(self, name: str, changes: QueueOptions, *, only_undeclared: bool) -> QueueSettings:
        """Return the settings, which this process may not change; the caller compares them with what it expects."""
        holds = await self.settings(name, fresh=True)
        wanted = {option: value for option, value in changes.items() if getattr(holds, option) != value}
        if wanted and not only_undeclared:
            listed = ", ".join(f"{option}={value!r}" for option, value in wanted.items())
            raise ConfigError(
                f"the settings of {name!r} belong to its entity and are not changed ({listed}); change them in the "
                "portal, or connect with ?create=yes and the right Manage"
            )
        return holds

    async def note(self, name: str, idle_at: float) -> None:
        """Note when a queue may be deleted if it is not used; create it if it is missing."""

        def note(entity: Entity) -> dict[str, Any]:
            return {"user_metadata": replace(_noted(entity, Noted()), idle_at=idle_at).written()}

        path = await self.path_of(name)
        try:
            await self._administration.update(path, note)
        except NoRights:
            raise no_rights(self._namespace, "reading and changing entities") from None

    async def _readable(self, path: Path) -> Entity | None:
        try:
            return await self._administration.find(path)
        except NoRights:
            raise no_rights(self._namespace, "reading and changing entities") from None

    async def _create(self, name: str, changes: QueueOptions, *, sessions: bool, is_open: bool = False) -> bool:
        """Create a queue; return False if another process has done so."""
        entity = entity_of(name)
        settings = QueueSettings(**changes)
        _check_native(settings)
        noted = Noted(
            None if entity == name else name,
            tuple(changes),
            changes.get("body_max"),
            _retention(changes),
            is_open=is_open,
            made=secrets.token_hex(8),
        )
        self._settings.pop(name, None)
        try:
            return await self._administration.create(entity, _options(settings, noted, sessions=sessions))
        except NoRights:
            raise no_rights(self._namespace, f"creating {name!r} (?create=yes)") from None

    async def _find(self, name: str) -> Path | None:
        """Return the entity that *name* means; without the right to look, the one that its form means."""
        written = subscription_of(name)
        paths = [Path(*written)] if written else [Path(entity_of(name))]
        if not written and (maybe := may_be_subscription(name)) is not None:
            paths.append(Path(*maybe))
        if self._administration.may_manage is not False:
            try:
                for path in paths:
                    if await self._administration.find(path) is not None:
                        return path
                return None
            except NoRights:
                pass
        return await self._first_that_answers(paths)

    async def _first_that_answers(self, paths: Sequence[Path]) -> Path | None:
        """Return the first of *paths* that is there; one that only refuses is taken if there is no other."""
        refusal: Refused | None = None
        for path in paths:
            try:
                if await self._answers(path):
                    return path
            except Refused as refused:
                if refused.condition not in NO_RIGHTS:
                    raise
                refusal = refusal or refused  # the login may be for another entity
        if refusal is not None:
            raise refusal
        return None

    async def _answers(self, path: Path) -> bool:
        """Return whether there is an entity, found out by opening its management node."""
        try:
            await self._namespace.ask(path, "peek-message", _FIRST)
        except Refused as refused:
            if refused.condition == NOT_FOUND:
                return False
            if refused.condition == "amqp:unauthorized-access":  # a sender need not be able to look
                return True
            raise
        return True


def settings_of(entity: Entity) -> QueueSettings:
    """Return the settings of an entity."""
    noted = Noted.read(entity.metadata) or Noted()
    usual = QueueSettings()
    return QueueSettings(
        lock=entity.lock,
        max_deliveries=entity.max_deliveries,
        dedupe_window=0.0 if entity.dedupe_window is None else entity.dedupe_window,
        body_max=noted.body_max or usual.body_max,
        dead_retention=noted.dead_retention or usual.dead_retention,
    )


def _noted(entity: Entity, otherwise: Noted) -> Noted:
    """Return what is noted in an entity's metadata, or *otherwise* if that can't be read."""
    return Noted.read(entity.metadata) or otherwise


def declared_of(entity: Entity) -> QueueOptions:
    """Return the settings that were declared: of an entity that tenure did not create, all that it has."""
    noted, holds = Noted.read(entity.metadata), settings_of(entity)
    names = NATIVE if noted is None else noted.declared
    known = [name for name in names if name in QueueOptions.__annotations__]
    return cast(QueueOptions, {name: getattr(holds, name) for name in known})


def _native(changes: QueueOptions, entity: Entity, name: str) -> dict[str, Any]:
    """Return *changes* as those of an entity.

    Raises:
        ConfigError: It can't have these settings.
    """
    _check_native(QueueSettings(**changes))
    noted = Noted.read(entity.metadata)
    if noted is None and entity.metadata:
        raise ConfigError(
            f"the entity of {name!r} has user metadata of another program, so tenure can't keep its settings there; "
            "change them in the portal"
        )
    if "dedupe_window" in changes and entity.dedupe_window is None:
        raise ConfigError(
            f"the entity of {name!r} was created without duplicate detection, which can't be changed; create it anew"
        )
    kept = noted or Noted(declared=NATIVE)
    declared = (*kept.declared, *(option for option in changes if option not in kept.declared))
    given: dict[str, Any] = {
        option: value for option, value in changes.items() if option in ("body_max", "dead_retention")
    }
    if given.get("dead_retention") == math.inf:
        given["dead_retention"] = None
    found: dict[str, Any] = {"user_metadata": replace(kept, declared=declared, **given).written()}
    if "lock" in changes:
        found["lock_duration"] = timedelta(seconds=changes["lock"])
    if "max_deliveries" in changes:
        found["max_delivery_count"] = changes["max_deliveries"]
    if "dedupe_window" in changes:
        found["duplicate_detection_history_time_window"] = timedelta(seconds=changes["dedupe_window"])
    return found


def _options(settings: QueueSettings, noted: Noted, *, sessions: bool) -> dict[str, Any]:
    """Return the options with which a queue is created."""
    return {
        "lock_duration": timedelta(seconds=settings.lock),
        "max_delivery_count": settings.max_deliveries,
        "requires_session": sessions,
        "requires_duplicate_detection": True,
        "duplicate_detection_history_time_window": timedelta(seconds=settings.dedupe_window),
        "dead_lettering_on_message_expiration": True,
        "user_metadata": noted.written(),
    }


def _check_native(settings: QueueSettings) -> None:
    if not 20.0 <= settings.dedupe_window <= 604_800.0:
        raise ConfigError(
            f"dedupe_window ({settings.dedupe_window:g} s) must be from 20 s to 7 days on this backend; try "
            "dedupe_window=20"
        )


def _retention(changes: QueueOptions) -> float | None:
    found = changes.get("dead_retention", math.inf)
    return None if found == math.inf else found


def no_rights(namespace: Namespace, what: str) -> ConfigError:
    """Return the error for an operation that this process has no right to."""
    return ConfigError(
        f"{namespace.url}: {what} needs the right Manage; give the identity the role Azure Service Bus Data Owner, or "
        "use a policy with Manage"
    )


def _missing(namespace: Namespace, name: str) -> ConfigError:
    return ConfigError(
        f"{namespace.url} has no queue {name!r}, and no subscription of this name; create it in the portal, or connect "
        "with ?create=yes"
    )


def names_of(rows: list[tuple[str, str]]) -> list[str]:
    """Return the names of queues, from those of their entities and their user metadata."""
    return sorted(_name_of(entity, Noted.read(metadata)) for entity, metadata in rows if entity != SCHEDULES)


def _name_of(entity: str, noted: Noted | None) -> str:
    """Return the name of a queue: the one that is noted, if it is a name whose entity this is."""
    if noted is not None and noted.name is not None:
        with suppress(ConfigError):
            name = check_name(noted.name)
            return name if entity_of(name).lower() == entity.lower() else entity
    return entity


def idle_among(rows: list[tuple[str, str]], now: float) -> list[str]:
    """Return the names of queues whose time without use is over."""
    found = []
    for entity, metadata in rows:
        noted = Noted.read(metadata)
        if noted is not None and noted.idle_at is not None and noted.idle_at <= now:
            found.append(_name_of(entity, noted))
    return found
