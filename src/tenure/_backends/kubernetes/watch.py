"""Watches: one for each name that somebody waits for, and one for all Leases of tenure; continued where they broke off.

A watch of one Lease needs only the right to watch *that* Lease, and brings no events of others. It also shows each
renewal in the moment in which it happens, so that the time of an expiry is known without polling.

Whoever looks at many Leases again and again, as a member of a group does, follows all of them by one watch of the
namespace. It gives no hints, and only notes when each was renewed. A user who may watch single Leases only goes by
looks.

If this user may not watch, or has more names than may be watched, listeners are told that hints are absent.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from tenure._backends.kubernetes.client import Client, Request
from tenure._backends.kubernetes.observations import Observations
from tenure._backends.kubernetes.records import LABEL, about, has_version, is_lease, name_in
from tenure._runtime.shared_hints import SharedHints, Source
from tenure.errors import ConfigError

LASTS = (30.0, 60.0)
"""Seconds after which the server ends a watch, and it is continued: at random, so that not all do it at once."""

_CHANGES = ("ADDED", "MODIFIED", "DELETED")


class Watch(Source):
    """A watch on one loop."""

    def __init__(self, client: Client, hints: SharedHints[Any, Any], name: str, selected: Mapping[str, str]) -> None:
        super().__init__(hints)
        self._client = client
        self._request = Request("watch", name)
        self._selected = selected
        self._version: str | None = None
        """After which ``resourceVersion`` it continues; None: it begins with what is there."""

    @abstractmethod
    def chooses(self, lease: Any) -> bool:
        """Return whether *lease* is one that it asked for, and not something that a proxy has answered instead."""

    @abstractmethod
    def changed(self, kind: str, lease: Any) -> None:
        """Note a Lease that was added, modified or deleted."""

    async def watch(self) -> None:
        """Handle the events of one watch until it ends; if it is refused, note that."""
        try:
            await self._watch()
        except Exception as error:
            self._version = None  # begin with what is there: the server may have forgotten the version
            if not isinstance(error, ConfigError):
                raise
            self.deaf()

    async def _watch(self) -> None:
        lasts = random.uniform(*LASTS)
        query = {
            "watch": "true",
            **self._selected,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(lasts)),
        }
        if self._version is not None:
            query["resourceVersion"] = self._version
        async with self._client.stream(self._request, self._client.leases_path, query, lasts=lasts) as events:
            self.live(anew=self._version is None)
            async for event in events:
                if not self._handle(str(event.get("type")), event.get("object")):
                    return

    def _handle(self, kind: str, lease: Any) -> bool:
        """Handle an event; return whether the watch goes on."""
        is_known = has_version(lease) if kind == "BOOKMARK" else kind in _CHANGES and self.chooses(lease)
        if not is_known:  # ERROR: usually 410, the version is too old
            self._version = None
            return False
        self._version = lease["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self.changed(kind, lease)
        return True


# --- one name ----------------------------------------------------------------------------------------------------


class Watches(SharedHints[str, "NameWatch"]):
    """The watches of single names of one opened backend, by event loop and name."""

    def __init__(self, client: Client, observations: Observations) -> None:
        super().__init__()
        self.client = client
        self.observed = observations

    def source(self, key: str) -> NameWatch:
        """Make the watch of a name."""
        return NameWatch(self, key)

    @property
    def are_all_used(self) -> bool:
        """Whether so many names are watched on this loop as may be."""
        return sum(source.is_watching for source in self.here().values()) >= self.client.options.watches


class NameWatch(Watch):
    """The watch of one name: gives hints, and notes renewals."""

    def __init__(self, watches: Watches, name: str) -> None:
        super().__init__(watches.client, watches, name, {"fieldSelector": f"metadata.name={name}"})
        self.is_watching = False
        self._watches = watches
        self._observed = watches.observed
        self._name = name
        self._about: tuple[object, ...] | None = None  # of which listeners were notified; None: there is no Lease

    async def follow(self) -> None:
        """Watch it, unless too many are watched, or it is refused."""
        if self._watches.are_all_used:
            self.deaf()
            return
        self.is_watching = True
        try:
            await self.watch()
        finally:
            self.is_watching = False

    def chooses(self, lease: Any) -> bool:
        """Return whether *lease* is that of the name."""
        return is_lease(lease, self._name)

    def changed(self, kind: str, lease: Any) -> None:
        """Note it, and notify listeners of all but a mere renewal."""
        if kind == "DELETED":
            self._observed.note_deleted(self._name, lease)
        else:
            self._observed.note(self._name, lease)
        seen = about(lease) if kind != "DELETED" else None
        if seen != self._about:  # and not what this process has read itself meanwhile: each listener is to know
            self._about = seen
            self.notify()


# --- all names ---------------------------------------------------------------------------------------------------


class Renewals(SharedHints[None, "NamespaceWatch"]):
    """The renewals of all Leases of tenure whose names begin with a prefix, noted while somebody follows them."""

    def __init__(self, client: Client, observations: Observations) -> None:
        super().__init__()
        self.client = client
        self.observed = observations

    async def keys_of(self, topic: str) -> Collection[None]:
        """Return the key of the only source: one watch serves all prefixes."""
        return (None,)

    def source(self, key: None) -> NamespaceWatch:
        """Make the watch of the namespace."""
        return NamespaceWatch(self)


class NamespaceWatch(Watch):
    """The watch of all Leases that tenure has ever acquired in the namespace: only notes them."""

    def __init__(self, renewals: Renewals) -> None:
        super().__init__(renewals.client, renewals, "", {"labelSelector": LABEL})
        self._observed = renewals.observed

    def end(self) -> None:
        """Watch them no more, and forget what was only followed."""
        super().end()
        self._observed.forget_followed()

    async def follow(self) -> None:
        """Watch them."""
        await self.watch()

    def chooses(self, lease: Any) -> bool:
        """Return whether *lease* is one."""
        return (name := name_in(lease)) is not None and is_lease(lease, name)

    def changed(self, kind: str, lease: Any) -> None:
        """Note it; not its end, as a Lease that has lost its label is reported as deleted, too."""
        name = lease["metadata"]["name"]
        if kind != "DELETED" and name.startswith(tuple(self.topics)):
            self._observed.note_followed(name, lease)
