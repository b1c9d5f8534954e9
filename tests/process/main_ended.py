"""A program whose main thread ends while other threads lead; it prints what these do then."""

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator

import tenure.sync
from tenure._runtime.renewal_thread import RenewalThread

TIMES: tenure.ElectionOptions = {"ttl": 10.0, "renew_every": 0.5, "retry_every": 2.0}
"""Renewed soon, and with time for a busy machine to answer."""
RENEWALS = 4

begun = threading.Barrier(4)  # all three, and the main thread


def outlive_main() -> None:
    """Return when the main thread has ended; it ends when all threads have begun."""
    begun.wait()
    threading.main_thread().join()


def renewed(term: tenure.Term | tenure.sync.Term) -> Iterator[None]:
    """Yield until the term has been renewed some times after the main thread has ended."""
    outlive_main()
    seen, count = term.remaining(), 0
    while count < RENEWALS:
        yield
        left = term.remaining()
        count, seen = count + (left > seen), left


def lead_in_a_thread(url: str) -> None:
    def work(term: tenure.sync.Term) -> None:
        for _ in renewed(term):
            term.lost.wait(0.01)
            term.check()

    with tenure.sync.connect(url) as backend:
        backend.election("a thread", **TIMES).run(work)
        backend.queue("letters").send(b"sent")
        assert backend.queue("letters").stats().ready == 1
    sys.stdout.write("a thread led on\n")


def lead_in_a_loop(url: str) -> None:
    async def work(term: tenure.Term) -> None:
        for _ in renewed(term):
            await asyncio.sleep(0.01)
            term.check()

    async def main() -> None:
        async with tenure.connect(url) as backend:
            await backend.election("a loop", **TIMES).run(work)

    asyncio.run(main())
    sys.stdout.write("a loop led on\n")


def resolve() -> None:
    """Look up a host, as a driver does to reconnect."""

    async def look_up() -> object:
        return await asyncio.get_running_loop().getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)

    renewal_thread = RenewalThread.enter()
    outlive_main()
    assert renewal_thread.call_blocking(look_up)
    renewal_thread.leave()
    sys.stdout.write("a host was found\n")


for target in (lead_in_a_thread, lead_in_a_loop):
    threading.Thread(target=target, args=(sys.argv[1],)).start()
threading.Thread(target=resolve).start()
begun.wait()
