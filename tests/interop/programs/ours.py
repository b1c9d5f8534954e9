"""A contestant that is tenure's own: ``ours.py URL TTL CONTESTANT ACTS``.

It obeys the lines on its standard input, and answers with lines, see ``tests/interop/contestants.py``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import tenure
from tests.interop.acts import ACT, BEGIN, END, Record
from tests.interop.programs.answering import PAUSE, commands, say


class Ours:
    def __init__(self, backend: tenure.Backend, ttl: float, contestant: str, record: Record) -> None:
        self.backend = backend
        self.ttl = ttl
        self.contestant = contestant
        self.record = record
        self.released: dict[str, asyncio.Event] = {}
        self.standing: dict[str, asyncio.Task[object]] = {}

    def election(self, name: str) -> tenure.Election:
        return self.backend.election(name, ttl=self.ttl, label=self.contestant)

    async def obey(self, command: str, name: str) -> None:
        if command == "stand":
            self.released[name] = asyncio.Event()
            self.standing[name] = asyncio.create_task(self.stand(name))
        elif command == "release":
            self.released[name].set()
        elif command == "leader":
            leader = await self.election(name).leader()
            say("leader", name, leader.holder if leader else "")

    async def stand(self, name: str) -> None:
        async def lead(term: tenure.Term) -> None:
            self.record.note(BEGIN, name, self.contestant)
            try:
                say("leading", name, str(term.token))
                while not self.released[name].is_set():
                    term.check()
                    self.record.note(ACT, name, self.contestant)
                    await asyncio.sleep(PAUSE)
            finally:
                self.record.note(END, name, self.contestant)

        await self.election(name).run(lead, stop=self.released[name])
        say("released", name)


async def main(url: str, ttl: str, contestant: str, acts: str) -> None:
    async with tenure.connect(url) as backend:
        ours = Ours(backend, float(ttl), contestant, Record(Path(acts)))
        say("ready")
        async for command, name in commands():
            await ours.obey(command, name)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
