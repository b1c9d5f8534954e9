"""Before: one process at a time writes the report, by an advisory lock of PostgreSQL. Needs: pip install asyncpg"""

import asyncio
import os

import asyncpg

KEY = 4217


async def main() -> None:
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    await connection.execute("SELECT pg_advisory_lock($1)", KEY)
    for page in range(1, 4):
        print(f"before: page {page}", flush=True)
        await asyncio.sleep(0.2)  # goes on if the connection is lost, and the lock with it
    await connection.close()


asyncio.run(main())
