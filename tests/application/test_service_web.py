"""A service in the processes of a web server: forked ones, and openings and closings in any number."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tenure

FORK_WHILE_OPENED = """
import os, signal
import tenure.sync

service = tenure.sync.Service("sqlite:///work.db").open()
service._turn.acquire()  # as a thread that opens or closes it
child = os.fork()
if child == 0:
    signal.alarm(30)
    service.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

OPEN_IN_THREADS = """
import os, sys, threading
import tenure.sync

service = tenure.sync.Service("sqlite:///work.db").open()
sys.setswitchinterval(1e-6)
for _ in range(20):
    child = os.fork()
    if child == 0:
        together = threading.Barrier(4)
        threads = [threading.Thread(target=lambda: (together.wait(), service.open())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        service.close()
        os._exit("not open" not in repr(service))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.process
@pytest.mark.parametrize("program", [FORK_WHILE_OPENED, OPEN_IN_THREADS])
def test_a_forked_child_opens_and_closes_its_own(program: str, tmp_path: Path) -> None:
    line = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


async def test_closing_a_service_that_is_not_open_does_nothing() -> None:
    service = tenure.Service("memory:")
    await service.aclose()
    async with service:
        await service.open()
        await service.aclose()
        assert await service.queue("orders").queue.stats() == tenure.Stats()
