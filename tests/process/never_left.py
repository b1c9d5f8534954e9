"""A program that ends inside blocks that it never leaves; its second argument selects them."""

import sys
import threading
from collections.abc import Iterator

import tenure.sync

# Each request may take long: on a busy machine, a warning that the store is slow would be in the output.
url, kind = sys.argv[1:]


def lead() -> None:
    campaign.__enter__()
    sys.stdout.write("leads\n")
    entered.set()


def lead_on() -> None:
    lead()
    threading.Event().wait()


def lead_in_a_generator() -> Iterator[None]:
    with tenure.sync.connect(url) as own, own.election("chair", ttl=600.0, retry_every=60.0).campaign():
        sys.stdout.write("leads\n")
        yield


def look() -> Iterator[tenure.sync.Backend]:
    with tenure.sync.connect(url) as own:
        for _ in own.election("chair").observe():
            yield own


def hold_a_session() -> Iterator[tenure.sync.Backend]:
    with tenure.sync.connect(url) as own:
        queue = own.queue("orders")
        queue.send(b"x", session="s")
        with queue.session("s"):
            yield own


unfinished: Iterator[object]
if kind == "generator":
    unfinished = lead_in_a_generator()
    next(unfinished)
elif kind == "session":
    unfinished = hold_a_session()
    next(unfinished)
elif kind == "stopped caller":
    unfinished = looking = look()
    # As after a daemon thread that the interpreter has stopped in the middle of a call.
    next(looking)._renewal_thread._lock.acquire()
else:
    backend = tenure.sync.connect(url)
    backend.__enter__()
    campaign = backend.election("chair", ttl=600.0, retry_every=60.0).campaign()
    entered = threading.Event()
    if kind == "main":
        lead()
    else:
        threading.Thread(target=lead_on, daemon=True).start()
    entered.wait()
    seen = backend.election("chair").observe()  # a generator that is never finished, either
    next(seen)
