"""A contestant that follows the rules of client-go's leader election: ``SERVER NAMESPACE DURATION CONTESTANT ACTS``.

It is a double of ``tools/leaderelection`` with a ``LeaseLock`` and ``ReleaseOnCancel``, with its times shortened in
proportion (15, 10 and 2 s). It was compared with the source: ``leaderelection.go`` and ``resourcelock/leaselock.go`` of
kubernetes/client-go at 32ce75a, ``coordination/v1/types.go`` of kubernetes/api at 10b39a3 (both of 24 July 2026), and
``micro_time.go`` of kubernetes/apimachinery at 259d5f7. It has no code of tenure. ``INTEROP_TOKEN`` and
``INTEROP_CA`` in the environment are for a server that wants them. The rules:

- A candidate asks each U[1, 2.2] × retry period. It compares the record that it reads with the last one, as
  JSON, in which the times are whole seconds. From the moment at which it saw a change, on its own monotonic clock, the
  lease is valid for as long as the *record* says, unless the record has no holder.
- It takes a lease over by a replace under the resource version that it has read; it changes the spec only.
- A leader replaces the lease each retry period, at first without reading it; if that fails, it reads and tries again,
  each retry period, for the renew deadline at most. Then it stops.
- To release, it reads the lease, and writes an empty holder and a duration of 1 s; again after a conflict.
"""

from __future__ import annotations

import json
import os
import random
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.interop.acts import Record
from tests.interop.programs.answering import Threads, lead

JITTER = 1.2
MICROTIME = "%Y-%m-%dT%H:%M:%S.%fZ"


@dataclass(frozen=True)
class ElectionRecord:
    """What the election reads from and writes to the spec of a lease."""

    holder: str = ""
    duration: int = 0
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    preferred: str = ""
    strategy: str = ""

    @classmethod
    def of(cls, spec: dict[str, Any]) -> ElectionRecord:
        return cls(
            spec.get("holderIdentity") or "",
            spec.get("leaseDurationSeconds") or 0,
            spec.get("acquireTime") or "",
            spec.get("renewTime") or "",
            spec.get("leaseTransitions") or 0,
            spec.get("preferredHolder") or "",
            spec.get("strategy") or "",
        )

    def spec(self) -> dict[str, Any]:
        spec = {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": self.duration,
            "acquireTime": self.acquired or None,
            "renewTime": self.renewed or None,
            "leaseTransitions": self.transitions,
        }
        further = {"preferredHolder": self.preferred, "strategy": self.strategy}
        return spec | {name: value for name, value in further.items() if value}

    def raw(self) -> str:
        """Return the text by which two records are compared: its times are whole seconds."""
        seconds = {name: getattr(self, name).partition(".")[0] for name in ("acquired", "renewed")}
        return json.dumps(asdict(self) | seconds)


class LeaseLock:
    """One lease of the API server."""

    def __init__(self, server: str, namespace: str, name: str, identity: str, timeout: float) -> None:
        self.leases = f"{server}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.namespace = namespace
        self.name = name
        self.identity = identity
        self.timeout = timeout
        self.token = os.environ.get("INTEROP_TOKEN", "")
        self.trust = ssl.create_default_context(cafile=os.environ.get("INTEROP_CA"))
        self.lease: dict[str, Any] = {}

    def get(self) -> ElectionRecord:
        self.lease = self.ask("GET", f"/{self.name}")
        return ElectionRecord.of(self.lease.get("spec") or {})

    def create(self, record: ElectionRecord) -> None:
        metadata = {"name": self.name, "namespace": self.namespace}
        self.lease = self.ask("POST", "", self.kind() | {"metadata": metadata, "spec": record.spec()})

    def update(self, record: ElectionRecord) -> None:
        self.lease["spec"] = record.spec()
        self.lease = self.ask("PUT", f"/{self.name}", self.kind() | self.lease)

    def kind(self) -> dict[str, Any]:
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.leases + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=self.timeout, context=self.trust) as answer:
            return dict(json.load(answer))


class LeaderElector:
    """The election: ``acquire`` returns when it leads, ``renew`` when it doesn't any more."""

    def __init__(self, lock: LeaseLock, duration: int) -> None:
        self.lock = lock
        self.duration = duration
        self.renew_deadline = duration * 10 / 15
        self.retry_period = duration * 2 / 15
        self.observed = ElectionRecord()
        self.observed_raw = ""
        self.observed_at = 0.0

    def acquire(self) -> None:
        while not self.try_acquire_or_renew():
            time.sleep(self.retry_period * random.uniform(1.0, 1.0 + JITTER))

    def renew(self, cancelled: threading.Event) -> None:
        while not cancelled.is_set():
            give_up = time.monotonic() + self.renew_deadline
            while not self.try_acquire_or_renew():
                if cancelled.wait(self.retry_period) or time.monotonic() > give_up:
                    return
            cancelled.wait(self.retry_period)

    def release(self) -> None:
        """Release the lease, whoever holds it now, if this candidate last knew itself as the holder."""
        while True:
            try:
                old = self.lock.get()
                if not self.leads():
                    return
                now = microtime()
                record = ElectionRecord("", 1, now, now, old.transitions)
                self.lock.update(record)
            except urllib.error.HTTPError as error:
                if error.code != 409:
                    return
            except OSError:
                return
            else:
                self.observe(record)
                return

    def try_acquire_or_renew(self) -> bool:
        try:
            return self.acquired_or_renewed()
        except OSError:  # also every answer that is an error
            return False

    def acquired_or_renewed(self) -> bool:
        now, at = microtime(), time.monotonic()
        record = ElectionRecord(self.lock.identity, self.duration, now, now)
        if self.leads() and self.is_valid(at) and self.renewed_without_reading(record):
            return True
        try:
            old = self.lock.get()
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            self.lock.create(record)
            self.observe(record)
            return True
        if self.observed_raw != old.raw():
            self.observe(old)
            self.observed_raw = old.raw()
        if old.holder and self.is_valid(at) and not self.leads():
            return False
        if self.leads():
            record = replace(record, acquired=old.acquired, transitions=old.transitions)
        else:
            record = replace(record, transitions=old.transitions + 1)
        self.lock.update(record)
        self.observe(record)
        return True

    def renewed_without_reading(self, record: ElectionRecord) -> bool:
        record = replace(record, acquired=self.observed.acquired, transitions=self.observed.transitions)
        try:
            self.lock.update(record)
        except OSError:
            return False
        self.observe(record)
        return True

    def leads(self) -> bool:
        return self.observed.holder == self.lock.identity

    def is_valid(self, now: float) -> bool:
        return self.observed_at + self.observed.duration > now

    def observe(self, record: ElectionRecord) -> None:
        self.observed = record
        self.observed_at = time.monotonic()


def microtime() -> str:
    """Return the time of day as the API server wants it, with six digits after the seconds."""
    return datetime.now(UTC).strftime(MICROTIME)


def main(server: str, namespace: str, duration: str, contestant: str, acts: str) -> None:
    record = Record(Path(acts))

    def lock_of(name: str) -> LeaseLock:
        return LeaseLock(server, namespace, name, contestant, max(1.0, float(duration) / 3))

    def campaign(name: str, released: threading.Event) -> None:
        elector = LeaderElector(lock_of(name), int(duration))
        elector.acquire()
        cancelled, stopped = threading.Event(), threading.Event()

        def renew() -> None:
            elector.renew(cancelled)
            stopped.set()

        renewing = threading.Thread(target=renew, daemon=True)
        renewing.start()
        lead(record, name, contestant, released, stopped.is_set)
        cancelled.set()
        renewing.join()
        elector.release()

    def leader(name: str) -> str:
        try:
            return lock_of(name).get().holder
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise

    Threads(campaign, leader, contestant).obey()


if __name__ == "__main__":
    main(*sys.argv[1:])
