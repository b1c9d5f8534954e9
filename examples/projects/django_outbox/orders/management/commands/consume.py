"""``manage.py consume``: one of any number of consumers."""

from typing import Any

from django.core.management.base import BaseCommand
from orders.handlers import service


class Command(BaseCommand):
    help = "Ship placed orders until SIGTERM or Ctrl-C; handlers that run then may finish."

    def handle(self, *args: Any, **options: Any) -> None:
        service.run()
