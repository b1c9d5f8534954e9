"""Let a database refuse a late write of an old leader, in the transaction of that write."""

import asyncio
import sqlite3
from contextlib import closing

import tenure
from tenure.backends.sqlite import Fence


def write(line: str, term: tenure.Term) -> None:
    with closing(sqlite3.connect("report.db")) as connection, connection:
        Fence(connection).check("report", term.token)  # raises TermLost if a newer leader has written
        connection.execute("INSERT INTO report VALUES (?, ?)", (term.token, line))


async def main() -> None:
    with closing(sqlite3.connect("report.db")) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS report (token INTEGER, line TEXT)")
    async with tenure.connect("sqlite:///work.db") as backend:
        election = backend.election("nightly-report", ttl=15)
        async with election.campaign() as old:
            write("the first leader's line", old)
        async with election.campaign() as new:
            write("the second leader's line", new)
            try:
                write("a late line of the first", old)
            except tenure.TermLost as refused:
                print(f"refused: {refused}")
    with closing(sqlite3.connect("report.db")) as connection:
        for token, line in connection.execute("SELECT token, line FROM report ORDER BY token DESC LIMIT 2"):
            print(f"term {token}: {line}")


asyncio.run(main())
