"""Send, complete and fence in transactions of one's own, with asyncpg: all or nothing."""

import asyncio
import os

import asyncpg

import tenure

URL = os.environ["TENURE_URL"]  # postgresql://…


async def main() -> None:
    connection = await asyncpg.connect(URL)
    await connection.execute("CREATE TEMP TABLE purchase (number int); CREATE TEMP TABLE invoice (number int)")
    async with tenure.connect(URL) as backend:
        await backend.migrate()
        queue = backend.queue("purchases-asyncpg")

        async with connection.transaction():
            await connection.execute("INSERT INTO purchase VALUES (17)")
            await connection.execute("SELECT tenure.send('purchases-asyncpg', $1)", b"17")

        [message] = await queue.receive(max=1, wait=10)
        async with connection.transaction():
            await connection.execute("INSERT INTO invoice VALUES ($1)", int(message.body))
            await connection.execute("SELECT tenure.complete('purchases-asyncpg', $1)", message.lock_token)
        print("invoiced", await connection.fetchval("SELECT number FROM invoice"), "and", await queue.stats())

        async with backend.election("invoices-asyncpg").campaign() as term, connection.transaction():
            await connection.execute("SELECT tenure.fence('invoices-asyncpg', $1)", term.token)
            await connection.execute("DELETE FROM invoice")
            print("written by the leader; an older leader is refused")
    await connection.close()


asyncio.run(main())
