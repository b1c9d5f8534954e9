"""The operations of queues. Each runs inside one transaction, on any connection.

Anything that can be refused is refused before the first write, so no operation fails half-way.
"""

from __future__ import annotations

from tenure._backends.sqlite.claiming import Claiming
from tenure._backends.sqlite.removal import Removal
from tenure._backends.sqlite.schema import TableSet
from tenure._backends.sqlite.settling import Settling

QUEUES = TableSet("queues", version=1, script="queue_schema.sql")
IDLE = TableSet("idle queues", version=1, script="idle_schema.sql")
DECLARED = TableSet("declared settings", version=1, script="declared_schema.sql")
SCHEDULES = TableSet("schedules", version=1, script="schedules_schema.sql")
LIMITS = TableSet("limits", version=1, script="limits_schema.sql")
HOLDERS = TableSet("holders", version=1, script="holders_schema.sql")
TABLES = [QUEUES, IDLE, DECLARED, SCHEDULES, LIMITS, HOLDERS]
"""The tables of a file with queues."""


class Operations(Claiming, Settling, Removal):
    """All operations of the queues of a file, inside one transaction."""
