"""Hints by watches: one for each name that somebody waits for, continued where it broke off.

A watch of one Lease needs only the right to watch *that* Lease, and brings no events of others. It also shows each
renewal in the moment in which it happens, so that the time of an expiry is known without polling.

If this user may not watch, or has more names than may be watched, listeners are told that hints are absent.
"""

from __future__ import annotations

import random
from typing import Any

from tenure._backends.kubernetes.client import Client, Request
from tenure._backends.kubernetes.observations import Observations
from tenure._backends.kubernetes.records import about, has_version, is_lease
from tenure._runtime.shared_hints import SharedHints, Source
from tenure.errors import ConfigError

LASTS = (30.0, 60.0)
"""Seconds after which the server ends a watch, and it is continued: at random, so that not all do it at once."""

_CHANGES = ("ADDED", "MODIFIED", "DELETED")


class Watches(SharedHints[str, "Watch"]):
    """The watches of one opened backend, by event loop and name."""

    def __init__(self, client: Client, observations: Observations) -> None:
        super().__init__()
        self.client = client
        self.observed = observations

    def source(self, key: str) -> Watch:
        """Make the watch of a name; beyond the limit, it only polls."""
        return Watch(self, key, may_watch=len(self.here()) < self.client.options.watches)


class Watch(Source):
    """The watch of one name on one loop."""

    def __init__(self, watches: Watches, name: str, *, may_watch: bool) -> None:
        super().__init__(watches)
        self._client = watches.client
        self._observed = watches.observed
        self._name = name
        self._may_watch = may_watch
        self._version: str | None = None
        """After which ``resourceVersion`` it continues; None: it begins with what is there."""
        self._about: tuple[object, ...] | None = None  # of which listeners were notified; None: there is no Lease

    async def follow(self) -> None:
        """Watch it, unless that may not be, or is refused."""
        if not self._may_watch:
            self.deaf()
            return
        try:
            await self._watch()
        except Exception as error:
            self._version = None  # begin with what is there: the server may have forgotten the version
            if not isinstance(error, ConfigError):
                raise
            self.deaf()

    async def _watch(self) -> None:
        """Handle the events of one watch until it ends."""
        lasts = random.uniform(*LASTS)
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={self._name}",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(lasts)),
        }
        if self._version is not None:
            query["resourceVersion"] = self._version
        request = Request("watch", self._name)
        async with self._client.stream(request, self._client.leases_path, query, lasts=lasts) as events:
            self.live(anew=self._version is None)
            async for event in events:
                if not self._handle(str(event.get("type")), event.get("object")):
                    return

    def _handle(self, kind: str, lease: Any) -> bool:
        """Handle an event; return whether the watch goes on."""
        is_known = has_version(lease) if kind == "BOOKMARK" else kind in _CHANGES and is_lease(lease, self._name)
        if not is_known:  # ERROR: usually 410, the version is too old
            self._version = None
            return False
        self._version = lease["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            if kind == "DELETED":
                self._observed.note_missing(self._name)
            else:
                self._observed.note(self._name, lease)
            seen = about(lease) if kind != "DELETED" else None
            if seen != self._about:  # and not what this process has read itself meanwhile: each listener is to know
                self._about = seen
                self.notify()
        return True
