"""Poll a device that allows one poller: `tenure lead` starts this on one host, and stops it before another leads."""

import os
import time

TERM = int(os.environ["TENURE_TOKEN"])  # higher in every term: send it along, so that a receiver can refuse an old one
EVERY = float(os.environ.get("POLLER_EVERY", "1"))

while True:
    print(f"term {TERM}: polled at {time.monotonic():.3f}", flush=True)  # here, talk to the device
    time.sleep(EVERY)
