"""All decoders of what others may have written."""

from __future__ import annotations

from tests.fuzz import of_azure_storage, of_coordinators, of_nats, of_own, of_rabbitmq, of_redis, of_servicebus, of_sql
from tests.fuzz.decoder import Decoder

_MODULES = (of_azure_storage, of_coordinators, of_nats, of_own, of_rabbitmq, of_redis, of_servicebus, of_sql)

DECODERS: dict[str, Decoder] = {one.name: one for module in _MODULES for one in module.DECODERS}
