"""A contestant that uses a recipe of kazoo: ``HOSTS PREFIX lock|election SESSION CONTESTANT ACTS``."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from kazoo.client import KazooClient

from tests.interop.acts import Record
from tests.interop.programs.answering import Threads, lead


def main(hosts: str, prefix: str, kind: str, session: str, contestant: str, acts: str) -> None:
    client = KazooClient(hosts, timeout=float(session))
    client.start()
    record = Record(Path(acts))

    def campaign(name: str, released: threading.Event) -> None:
        if kind == "election":
            client.Election(f"{prefix}/{name}", contestant).run(lead, record, name, contestant, released)
            return
        with client.Lock(f"{prefix}/{name}", contestant):
            lead(record, name, contestant, released)

    def leader(name: str) -> str:
        contenders = client.Lock(f"{prefix}/{name}").contenders()
        return str(contenders[0]) if contenders else ""

    Threads(campaign, leader, contestant).obey()
    client.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
