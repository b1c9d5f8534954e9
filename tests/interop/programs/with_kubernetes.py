"""A contestant that uses the election of Kubernetes' Python client: ``SERVER NAMESPACE DURATION CONTESTANT ACTS``.

That client never gives a lease up: its leader stops renewing it, and it runs out. ``INTEROP_TOKEN`` and
``INTEROP_CA`` in the environment are for a server that wants them.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from kubernetes import client
from kubernetes.leaderelection import electionconfig, leaderelection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

from tests.interop.acts import Record
from tests.interop.programs.answering import Threads, lead


class Released(Exception):
    """Raised in the work of a leader: the only way in which that client stops leading."""


def main(server: str, namespace: str, duration: str, contestant: str, acts: str) -> None:
    configuration = client.Configuration()
    configuration.host = server
    configuration.api_key = {"authorization": f"Bearer {os.environ.get('INTEROP_TOKEN', '')}"}
    configuration.ssl_ca_cert = os.environ.get("INTEROP_CA")
    client.Configuration.set_default(configuration)
    record = Record(Path(acts))

    def campaign(name: str, released: threading.Event) -> None:
        def work() -> None:
            lead(record, name, contestant, released)
            raise Released

        lock = LeaseLock(name, namespace, contestant)
        # It refuses a retry_period below a second, so the times are shortened afterwards.
        config = electionconfig.Config(lock, int(duration) + 2, 2, 1, work, lambda: None)
        config.lease_duration, config.renew_deadline, config.retry_period = int(duration), int(duration) * 2 / 3, 0.2
        leaderelection.LeaderElection(config).run()

    def leader(name: str) -> str:
        there, lease = LeaseLock(name, namespace, contestant).get(name, namespace)
        return (lease.holder_identity or "") if there else ""

    Threads(campaign, leader, contestant).obey()


if __name__ == "__main__":
    main(*sys.argv[1:])
