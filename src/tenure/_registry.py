"""The table of URL schemes, with the backend for each, and the extra with its driver. Imports a backend on demand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from tenure._url import Url
from tenure.errors import BackendNotInstalled, ConfigError

BACKENDS: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        # scheme: (module, extra that brings its driver; None where the standard library is enough)
        "amqp": ("tenure._backends.rabbitmq", "rabbitmq"),
        "amqps": ("tenure._backends.rabbitmq", "rabbitmq"),
        "azure": ("tenure._backends.azure_storage", "azure"),
        "azurite": ("tenure._backends.azure_storage", "azure"),
        "etcd": ("tenure._backends.etcd", "etcd"),
        "etcds": ("tenure._backends.etcd", "etcd"),
        "kubernetes": ("tenure._backends.kubernetes", "kubernetes"),
        "memory": ("tenure._backends.memory", None),
        "nats": ("tenure._backends.nats", "nats"),
        "postgres": ("tenure._backends.postgres", "postgres"),
        "postgresql": ("tenure._backends.postgres", "postgres"),
        "redis": ("tenure._backends.redis", "redis"),
        "redis+sentinel": ("tenure._backends.redis", "redis"),
        "redis+socket": ("tenure._backends.redis", "redis"),
        "redis+unix": ("tenure._backends.redis", "redis"),
        "rediss": ("tenure._backends.redis", "redis"),
        "rediss+sentinel": ("tenure._backends.redis", "redis"),
        "servicebus": ("tenure._backends.servicebus", "servicebus"),
        "sqlite": ("tenure._backends.sqlite", None),
        "peers": ("tenure._backends.peers", None),
        "unix": ("tenure._backends.redis", "redis"),
        "zookeeper": ("tenure._backends.zookeeper", "zookeeper"),
    }
)


def load(url: Url) -> ModuleType:
    """Import the backend that serves *url*.

    Raises:
        ConfigError: No backend has this scheme; the one that was meant is named, if that can be told.
        BackendNotInstalled: Its driver is missing; the message names the pip command.
    """
    try:
        module, extra = BACKENDS[url.scheme]
    except KeyError:
        from tenure._pasted import refusal_of_scheme

        raise ConfigError(refusal_of_scheme(url.scheme, BACKENDS)) from None
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("tenure"):
            raise
        raise BackendNotInstalled(
            f"{url.scheme}:// needs the package {error.name!r}, which is not installed; "
            f"run: pip install 'tenure[{extra}]'"
        ) from None
