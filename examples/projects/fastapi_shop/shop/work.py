"""What runs beside the web server in every instance: the handler of orders, and a candidate for the restock."""

import logging
import os
import socket
import time
from dataclasses import dataclass

import tenure
import tenure.sync

from . import database

PACKING_SECONDS = float(os.environ.get("SHOP_PACKING_SECONDS", "2"))
RESTOCK_SECONDS = float(os.environ.get("SHOP_RESTOCK_SECONDS", "10"))
INSTANCE = f"{socket.gethostname()}:{os.getpid()}"

log = logging.getLogger("shop")
backend = tenure.connect(os.environ.get("TENURE_URL", "sqlite:///work.db"))
service = tenure.Service(backend)


@dataclass
class Placed:
    """The body of a message."""

    order: str


placed = service.queue("orders", Placed, lock=10)  # if an instance dies, another one has its orders within 10 s


# The functions here are plain ones, because sqlite3 blocks; tenure runs them in threads.


@service.handler(placed, concurrency=4)
def pack(body: Placed) -> None:
    time.sleep(PACKING_SECONDS)  # a stand-in for the work
    if not database.pack(body.order, INSTANCE):
        raise tenure.Retry(delay=2)  # until the leader has restocked
    log.info("%s is packed", body.order)


@service.leader("restock", ttl=5)  # if the leader dies, another instance leads within about 5 s
def restock(term: tenure.sync.Term) -> None:
    while not term.lost.is_set():
        if count := database.restock(term.token):  # at first at once, so that older leaders are refused from now on
            log.info("%d items are restocked", count)
        term.lost.wait(RESTOCK_SECONDS)
