"""Orders and their shipments, and the report of each day."""

from datetime import UTC, date, datetime

from django.db import models
from django.utils import timezone


def today() -> date:
    return datetime.now(UTC).date()


class Order(models.Model):
    item = models.CharField(max_length=100)
    count = models.PositiveIntegerField()
    day = models.DateField(default=today)


class Shipment(models.Model):
    """The effect of a message. Nothing in the table prevents a second one for an order: the transaction does."""

    order = models.ForeignKey(Order, on_delete=models.PROTECT, related_name="shipments")
    shipped_at = models.DateTimeField(default=timezone.now)
    shipped_by = models.CharField(max_length=300)


class Report(models.Model):
    """A day in numbers, written by the leader."""

    day = models.DateField(unique=True)
    orders = models.PositiveIntegerField()
    shipments = models.PositiveIntegerField()
    term = models.PositiveBigIntegerField()
