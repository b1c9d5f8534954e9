"""For programs that keep their own data in PostgreSQL: a fence for a transaction of asyncpg."""

from tenure._backends.postgres.fence import TOO_OLD, fence
from tenure._public import publish_all

__all__ = ["TOO_OLD", "fence"]

publish_all(__name__)
