"""A program that ends inside of blocks it never leaves; its second argument says which."""

import sys
import threading
from collections.abc import Iterator

import tenure.sync

url, kind = sys.argv[1:]


def lead() -> None:
    campaign.__enter__()
    sys.stdout.write("leads\n")
    entered.set()


def lead_on() -> None:
    lead()
    threading.Event().wait()


def lead_in_a_generator() -> Iterator[None]:
    with tenure.sync.connect(url) as own, own.election("chair", ttl=60.0).campaign():
        sys.stdout.write("leads\n")
        yield


if kind == "generator":
    unfinished = lead_in_a_generator()
    next(unfinished)
else:
    backend = tenure.sync.connect(url)
    backend.__enter__()
    campaign = backend.election("chair", ttl=60.0).campaign()
    entered = threading.Event()
    if kind == "main":
        lead()
    else:
        threading.Thread(target=lead_on, daemon=True).start()
    entered.wait()
    seen = backend.election("chair").observe()  # a generator that is never finished, either
    next(seen)
