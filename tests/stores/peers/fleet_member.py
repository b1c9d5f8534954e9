"""A member as a process: leads when it can, and logs when it does. ``fleet_member.py URL TTL LOG``."""

from __future__ import annotations

import asyncio
import os
import sys

import tenure
from tenure._runtime.clock import SystemClock


async def main(url: str, ttl: float, log: str) -> None:
    clock = SystemClock()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(at: float, what: str, term: tenure.Term) -> None:
        os.write(file, f"{at:.6f} {what} {term.token} {term.holder}\n".encode())

    async def work(term: tenure.Term) -> None:
        what = "in"
        try:
            while True:
                at = clock.now()
                try:
                    term.check()
                except tenure.TermLost:  # also before the first act: this process may not have run for long
                    return
                write(at, what, term)  # the term was trusted at this time; the line may be written later
                what = "act"
                await asyncio.sleep(0.02)
        finally:
            write(clock.now(), "out", term)

    async with tenure.connect(url) as backend:
        await backend.election("chair", ttl=ttl, label=url.partition("me=")[2].partition(":")[0]).run(work, again=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
