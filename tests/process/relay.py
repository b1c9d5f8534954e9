"""A command that forks all the time: each generation lives for a moment, in a session of its own, and leaves the next.

Start it with the seconds that a generation lives, and the file to write beats into. As long as one lives, that file is
locked (flock): so a test can tell, at any moment, whether all are gone. TERM is not heard.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

LIFE = 30.0  # seconds until it ends by itself, should nobody end it

signal.signal(signal.SIGTERM, signal.SIG_IGN)
period, path = float(sys.argv[1]), sys.argv[2]
beats = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
fcntl.flock(beats, fcntl.LOCK_EX)  # the generations share the lock, as they share the open file
give_up = time.monotonic() + LIFE
while time.monotonic() < give_up:
    os.write(beats, f"beat {os.environ.get('TENURE_TOKEN', 0)} {os.getpid()}\n".encode())
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(period)
