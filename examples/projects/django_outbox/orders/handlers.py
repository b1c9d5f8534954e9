"""The consumer of placed orders; ``manage.py consume`` runs it."""

import logging
import os
import socket
import time
from dataclasses import dataclass

from django.conf import settings

import tenure.sync

from . import outbox
from .models import Shipment

log = logging.getLogger(__name__)
INSTANCE = f"{socket.gethostname()}:{os.getpid()}"


@dataclass
class Placed:
    """The body of a message."""

    order: int


service = tenure.sync.Service()  # on the store that TENURE_URL names
placed = service.queue("orders-placed", Placed)


@service.handler(placed, concurrency=4)
@outbox.fresh_connections()
def ship(body: Placed, message: tenure.sync.Message) -> None:
    time.sleep(settings.SHIPPING_SECONDS)  # a stand-in for the work, before the transaction, which stays short
    with outbox.completing(message):
        Shipment.objects.create(order_id=body.order, shipped_by=INSTANCE)
    log.info("order %d is shipped", body.order)
