"""Send, complete and fence in transactions of one's own, with SQLAlchemy: all or nothing."""

import os

from sqlalchemy import create_engine, text

import tenure.sync

URL = os.environ["TENURE_URL"]  # postgresql://…

engine = create_engine(URL.replace("postgresql://", "postgresql+psycopg://"), pool_size=1)
with tenure.sync.connect(URL) as backend:
    backend.migrate()
    queue = backend.queue("purchases-sqlalchemy")
    with engine.begin() as connection:
        connection.execute(text("CREATE TEMP TABLE purchase (number int)"))
        connection.execute(text("CREATE TEMP TABLE invoice (number int)"))

    with engine.begin() as connection:
        connection.execute(text("INSERT INTO purchase VALUES (17)"))
        connection.execute(text("SELECT tenure.send('purchases-sqlalchemy', :body)"), {"body": b"17"})

    [message] = queue.receive(max=1, wait=10)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO invoice VALUES (:number)"), {"number": int(message.body)})
        connection.execute(
            text("SELECT tenure.complete('purchases-sqlalchemy', :lock_token)"), {"lock_token": message.lock_token}
        )
        print("invoiced", connection.scalar(text("SELECT number FROM invoice")), "and", queue.stats())

    with backend.election("invoices-sqlalchemy").campaign() as term, engine.begin() as connection:
        connection.execute(text("SELECT tenure.fence('invoices-sqlalchemy', :token)"), {"token": term.token})
        connection.execute(text("DELETE FROM invoice"))
        print("written by the leader; an older leader is refused")
engine.dispose()
