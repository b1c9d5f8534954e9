"""Meanwhile: lead with tenure, and hold the old advisory lock, too, until the last old process has been replaced."""

import asyncio
import os

import asyncpg

import tenure

KEY = 4217
URL = os.environ["DATABASE_URL"]


async def report(term: tenure.Term) -> None:
    connection = await asyncpg.connect(URL)
    try:
        await connection.execute("SELECT pg_advisory_lock($1)", KEY)  # waits for an old process; the term is renewed
        for page in range(1, 4):
            term.check()
            print(f"bridge: page {page}", flush=True)
            await asyncio.sleep(0.2)
    finally:
        await connection.close()  # and so frees the old lock before the lease


async def main() -> None:
    async with tenure.connect(URL) as backend:
        await backend.election("nightly-report", ttl=15).run(report)


asyncio.run(main())
