"""The report of the day, which the leader keeps up to date; ``manage.py lead`` runs it."""

from django.db import transaction

from . import outbox
from .models import Order, Report, Shipment, today


@outbox.fresh_connections()
def write_report(token: int) -> None:
    """Write the report of today, unless a newer leader has written one."""
    with transaction.atomic():
        outbox.fence("report", token)
        day = today()
        numbers = {
            "orders": Order.objects.filter(day=day).count(),
            "shipments": Shipment.objects.filter(order__day=day).count(),
            "term": token,
        }
        Report.objects.update_or_create(day=day, defaults=numbers)
