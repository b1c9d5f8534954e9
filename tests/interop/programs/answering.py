"""What the contestants written in Python share: the commands they obey, their answers, and a term on a thread."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from tests.interop.acts import ACT, BEGIN, END, Record

PAUSE = 0.005
"""Between two acts, in seconds."""


def say(*words: str) -> None:
    """Write a line in one piece, so that the lines of several threads don't mix."""
    os.write(sys.stdout.fileno(), (" ".join(words) + "\n").encode())


async def commands() -> AsyncIterator[tuple[str, str]]:
    """Yield the commands on standard input, until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        command, _, name = line.decode().strip().partition(" ")
        yield command, name


class Threads:
    """A contestant with a thread for each election: *campaign* waits until it leads, calls ``lead``, and resigns.

    Args:
        campaign: Called with the election's name and the event that is set when the leadership is to be given up.
        leader: Returns the identity of the leader of a name, as this client sees it; empty for none.
    """

    def __init__(
        self, campaign: Callable[[str, threading.Event], None], leader: Callable[[str], str], contestant: str
    ) -> None:
        self.campaign = campaign
        self.leader = leader
        self.contestant = contestant
        self.released: dict[str, threading.Event] = {}

    def obey(self) -> None:
        """Obey the commands on standard input, until it ends; then end this process, whatever its threads do."""
        say("ready")
        for line in sys.stdin:
            command, _, name = line.strip().partition(" ")
            if command == "stand":
                self.released[name] = threading.Event()
                threading.Thread(target=self.stand, args=(name,), daemon=True).start()
            elif command == "release":
                self.released[name].set()
            elif command == "leader":
                say("leader", name, self.leader(name))

    def stand(self, name: str) -> None:
        self.campaign(name, self.released[name])
        say("released", name)


def lead(
    record: Record, name: str, contestant: str, released: threading.Event, lost: Callable[[], bool] = lambda: False
) -> None:
    """Act as the leader until it is *released*, or *lost*."""
    record.note(BEGIN, name, contestant)
    try:
        with suppress(BrokenPipeError):  # the test has ended
            say("leading", name)
        while not lost():
            record.note(ACT, name, contestant)
            if released.wait(PAUSE):
                break
    finally:
        record.note(END, name, contestant)
