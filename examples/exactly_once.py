"""A handler's own writes and the end of its message in one transaction: the effect happens exactly once."""

import sqlite3
from contextlib import closing

import tenure
from tenure.backends.sqlite import transact


def book(message: tenure.sync.Message) -> None:
    with closing(sqlite3.connect("work.db")) as connection, transact(connection) as queues:
        connection.execute("UPDATE account SET balance = balance + ?", (int(message.body),))
        queues.send("receipts", tenure.Outgoing(b"booked " + message.body))
        queues.complete(message)  # raises LockLost if another consumer may have it: then all of this is rolled back


with closing(sqlite3.connect("work.db")) as connection, connection:
    connection.execute("CREATE TABLE IF NOT EXISTS account (id INTEGER PRIMARY KEY, balance INTEGER)")
    connection.execute("INSERT OR IGNORE INTO account VALUES (1, 0)")

with tenure.sync.connect("sqlite:///work.db") as backend:
    bookings = backend.queue("bookings")
    for amount in (b"5", b"7"):
        bookings.send(amount)
    bookings.consume(book, concurrency=1, until_empty=True)
    print(f"{backend.queue('receipts').stats().ready} receipts")

with closing(sqlite3.connect("work.db")) as connection:
    print(f"the balance is {connection.execute('SELECT balance FROM account').fetchone()[0]}")
