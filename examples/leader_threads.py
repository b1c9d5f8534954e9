"""Without asyncio: the same interface, for plain functions and threads."""

import time

import tenure


def coordinate(term: tenure.sync.Term) -> None:
    for page in range(1, 4):
        term.check()  # a thread can't be cancelled, so the work has to check
        print(f"page {page} of the report, written in term {term.token}")
        time.sleep(0.2)


with tenure.sync.connect("sqlite:///work.db") as backend:
    backend.election("nightly-report", ttl=15).run(coordinate)
