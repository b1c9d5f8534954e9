"""The verbs of queues: each is done to the books inside one transaction, on whatever connection that runs.

What can be refused is refused before the first write, and nothing here fails half-way.
"""

from __future__ import annotations

from tenure._backends.sqlite.claiming import Claiming
from tenure._backends.sqlite.removal import Removal
from tenure._backends.sqlite.schema import TableSet
from tenure._backends.sqlite.settling import Settling

QUEUES = TableSet("queues", version=1, script="queue_schema.sql")
IDLE = TableSet("idle queues", version=1, script="idle_schema.sql")
DECLARED = TableSet("declared settings", version=1, script="declared_schema.sql")
TABLES = [QUEUES, IDLE, DECLARED]
"""What a file has that holds queues."""


class Operations(Claiming, Settling, Removal):
    """Everything that can be asked of the queues of a file, inside one transaction."""
