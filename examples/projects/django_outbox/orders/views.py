"""Take orders, and show them."""

from django.db import transaction
from django.forms import ModelForm
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_GET, require_POST

from . import outbox
from .handlers import Placed, placed
from .models import Order, Report, today


class OrderForm(ModelForm):
    class Meta:
        model = Order
        fields = ("item", "count")


@require_POST
def place(request: HttpRequest) -> JsonResponse:
    form = OrderForm(request.POST)
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    with transaction.atomic():
        order = form.save()
        outbox.send(placed, Placed(order.pk), message_id=f"order-{order.pk}")
    return JsonResponse({"order": order.pk}, status=202)


@require_GET
def show(request: HttpRequest, pk: int) -> JsonResponse:
    order = get_object_or_404(Order, pk=pk)
    shipped_by = [one.shipped_by for one in order.shipments.all()]
    return JsonResponse({"order": order.pk, "item": order.item, "count": order.count, "shipped_by": shipped_by})


@require_GET
def report(request: HttpRequest) -> JsonResponse:
    found = get_object_or_404(Report, day=today())
    return JsonResponse({"orders": found.orders, "shipments": found.shipments, "term": found.term})
