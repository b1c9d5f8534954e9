"""What some stores bring besides elections and queues, one module each.

- :mod:`tenure.backends.sqlite`: ``Fence``; ``transact`` and ``Within``, to settle a message in your own transaction.
- :mod:`tenure.backends.postgres`: ``fence``, to refuse an older leader in your own transaction.
- :mod:`tenure.backends.azure_storage`: ``Fence`` for blobs; ``lease_id``, for native clients.
- :mod:`tenure.backends.rabbitmq`: ``amqp_name`` and ``dead_letters_name``, for native clients.

Nothing of this is imported to use a backend: :func:`tenure.connect` chooses it by URL.
"""

from __future__ import annotations

__all__: list[str] = []
