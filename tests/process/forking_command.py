"""A command that keeps forking: each generation runs for a moment, in its own session, and starts the next one.

Its arguments: the seconds that a generation runs, and the file to write beats into. While any generation runs, that
file is locked (flock), so a test can check whether all have ended. TERM is ignored.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

SECONDS_MAX = 30.0  # then it ends by itself

signal.signal(signal.SIGTERM, signal.SIG_IGN)
period, path = float(sys.argv[1]), sys.argv[2]
beats = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
fcntl.flock(beats, fcntl.LOCK_EX)  # the generations share the open file, and so the lock
give_up = time.monotonic() + SECONDS_MAX
while time.monotonic() < give_up:
    os.write(beats, f"beat {os.environ.get('TENURE_TOKEN', 0)} {os.getpid()}\n".encode())
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(period)
