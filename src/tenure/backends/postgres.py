"""For programs that keep their own data in PostgreSQL: a fence for a transaction of asyncpg."""

from tenure._backends.postgres.fence import TOO_OLD, fence

__all__ = ["TOO_OLD", "fence"]
