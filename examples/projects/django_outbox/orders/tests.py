"""Orders and messages in one transaction. ``manage.py test`` makes a database of its own for them."""

import os
from unittest import mock

from django.db import transaction
from django.test import TransactionTestCase, override_settings

import tenure.sync

from . import outbox
from .apps import store_of
from .handlers import Placed, placed, service, ship
from .models import Order, Report, Shipment
from .reports import write_report


@override_settings(SHIPPING_SECONDS=0)
class OutboxTests(TransactionTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.enterClassContext(mock.patch.dict(os.environ, TENURE_URL=store_of("default")))
        cls.backend = cls.enterClassContext(tenure.sync.connect())
        cls.queue = cls.backend.queue("orders-placed")

    def setUp(self) -> None:
        self.queue.purge()

    def test_an_order_is_shipped_once(self) -> None:
        answer = self.client.post("/orders", {"item": "tea", "count": "2"})
        self.assertEqual(answer.status_code, 202)
        service.run(until_empty=True)
        shown = self.client.get(f"/orders/{answer.json()['order']}").json()
        self.assertEqual(len(shown["shipped_by"]), 1)
        self.assertEqual(self.queue.stats(), tenure.Stats())

    def test_a_wrong_order_is_refused(self) -> None:
        self.assertEqual(self.client.post("/orders", {"item": "tea"}).status_code, 400)
        self.assertEqual(self.queue.stats().ready, 0)

    def test_a_rollback_sends_nothing(self) -> None:
        with transaction.atomic():
            order = Order.objects.create(item="tea", count=2)
            outbox.send(placed, Placed(order.pk), message_id=f"order-{order.pk}")
            transaction.set_rollback(True)  # as after an error
        self.assertFalse(Order.objects.exists())
        self.assertEqual(self.queue.stats().ready, 0)

    def test_without_its_lock_a_handler_has_no_effect(self) -> None:
        order = Order.objects.create(item="tea", count=2)
        outbox.send(placed, Placed(order.pk), message_id="order")
        [message] = self.queue.receive(max=1, wait=10)
        message.give_back()  # another consumer may have it
        with self.assertRaises(tenure.LockLost):
            ship(Placed(order.pk), message)
        self.assertFalse(Shipment.objects.exists())
        self.assertEqual(self.queue.stats().ready, 1)

    def test_an_older_leader_is_refused(self) -> None:
        write_report(2)
        with self.assertRaises(tenure.TermLost):
            write_report(1)
        self.assertEqual(Report.objects.get().term, 2)
