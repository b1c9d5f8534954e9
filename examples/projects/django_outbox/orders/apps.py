"""The application, which lets ``manage.py migrate`` migrate the schema of tenure, too."""

import os
from typing import Any
from urllib.parse import urlsplit

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate

import tenure.sync


def store_of(alias: str) -> str:
    """Return the URL of a database of Django, which is another one while its tests run."""
    name = connections[alias].settings_dict["NAME"]
    return urlsplit(os.environ["TENURE_URL"])._replace(path=f"/{name}").geturl()


def migrate_tenure(using: str, **_: Any) -> None:
    """Bring the schema ``tenure`` up to date, and create the queues; if all is there, nothing is changed."""
    with tenure.sync.connect(store_of(using)) as backend:
        backend.migrate()
        backend.queue("orders-placed").declare(lock=10)  # if a consumer dies, another one has its orders within 10 s


class OrdersConfig(AppConfig):
    name = "orders"

    def ready(self) -> None:
        post_migrate.connect(migrate_tenure, sender=self)
