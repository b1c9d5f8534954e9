"""Send, complete and fence in transactions of one's own, with psycopg and threads: all or nothing."""

import os

import psycopg

import tenure.sync

URL = os.environ["TENURE_URL"]  # postgresql://…

with tenure.sync.connect(URL) as backend, psycopg.connect(URL, autocommit=True) as connection:
    backend.migrate()
    connection.execute("CREATE TEMP TABLE purchase (number int); CREATE TEMP TABLE invoice (number int)")
    queue = backend.queue("purchases-psycopg")

    with connection.transaction():
        connection.execute("INSERT INTO purchase VALUES (17)")
        connection.execute("SELECT tenure.send('purchases-psycopg', %s)", [b"17"])

    [message] = queue.receive(max=1, wait=10)
    with connection.transaction():
        connection.execute("INSERT INTO invoice VALUES (%s)", [int(message.body)])
        connection.execute("SELECT tenure.complete('purchases-psycopg', %s)", [message.lock_token])
    [(number,)] = connection.execute("SELECT number FROM invoice")
    print("invoiced", number, "and", queue.stats())

    with backend.election("invoices-psycopg").campaign() as term, connection.transaction():
        connection.execute("SELECT tenure.fence('invoices-psycopg', %s)", [term.token])
        connection.execute("DELETE FROM invoice")
        print("written by the leader; an older leader is refused")
