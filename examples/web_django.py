"""Django in one file: a view takes orders, and sends them after the transaction; a management command serves them.

export TENURE_URL=sqlite:///work.db
python web_django.py runserver
python web_django.py work
"""

import atexit
import sys
from dataclasses import dataclass
from typing import Any

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.management.base import BaseCommand
from django.db import close_old_connections, connection, models, transaction
from django.forms import ModelForm
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.http import require_POST

import tenure.sync

settings.configure(
    DEBUG=True,
    SECRET_KEY="for this example only",
    TIME_ZONE="UTC",
    ROOT_URLCONF=__name__,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
)
django.setup()


class Order(models.Model):
    item = models.CharField(max_length=100)
    count = models.PositiveIntegerField()
    is_served = models.BooleanField(default=False)

    class Meta:
        app_label = "shop"


class OrderForm(ModelForm):
    class Meta:
        model = Order
        fields = ("item", "count")


@dataclass
class Placed:
    order: int


service = tenure.sync.Service()  # on the store that TENURE_URL names
placed = service.queue("orders-placed", Placed)
atexit.register(service.close)


def send(order: Order) -> None:
    service.open()  # in each process that the server forks; it returns at once if it is open
    placed.send(Placed(order.pk), id=f"order-{order.pk}")  # sent again, it is dropped


@require_POST
def take(request: HttpRequest) -> JsonResponse:
    form = OrderForm(request.POST)
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    with transaction.atomic():
        order = form.save()
        transaction.on_commit(lambda: send(order))
    return JsonResponse({"order": order.pk}, status=202)


urlpatterns = [path("orders", take)]


@service.handler(placed)
def serve(message: Placed) -> None:
    close_old_connections()  # of this thread, as Django does around a request
    try:
        Order.objects.filter(pk=message.order).update(is_served=True)
    finally:
        close_old_connections()


class Command(BaseCommand):
    help = "Serve orders until SIGTERM or Ctrl-C."

    def handle(self, *args: Any, **options: Any) -> None:
        service.run()


def create_table() -> None:
    """Create the table of the orders; in a project, a migration does."""
    if Order._meta.db_table not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(Order)


if __name__ == "__main__":
    create_table()
    if sys.argv[1:] == ["work"]:  # in a project, Command is in shop/management/commands/work.py
        Command().run_from_argv(sys.argv)
    else:
        execute_from_command_line(sys.argv)
