"""A process with a candidate of its own that answers ``tenure status job --me``; started by test_probes.py.

Arguments: the folder of the store; what goes wrong: ``deaf`` (the work does not end with its term), ``loop`` (the main
event loop is blocked) or ``renewals`` (the loop of the renewal thread is blocked); and the seconds of the lease.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import tenure
from tenure._cli import lead_sockets
from tenure._cli.status_server import answering
from tenure._runtime.renewal_thread import RenewalThread


async def main(folder: Path, fault: str, ttl: float) -> None:
    async def work(term: tenure.Term) -> None:
        (folder / "began").touch()
        while fault != "deaf" and not (folder / "go").exists():
            await asyncio.sleep(0.01)
        match fault:
            case "loop":
                time.sleep(3600)
            case "renewals":
                RenewalThread.enter().loop.call_soon_threadsafe(time.sleep, 3600)
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async with tenure.connect(f"sqlite:///{folder / 'work.db'}") as backend:
        election = backend.election("job", ttl=ttl)
        with lead_sockets.listening("job", os.environ["TENURE_SOCKET_DIR"]) as listening:
            async with answering(listening, election.status):
                await election.run(work)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
