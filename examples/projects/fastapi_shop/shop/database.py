"""The shop's own data, in an SQLite file: what was ordered, and what is in stock."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from tenure.backends.sqlite import Fence

FILE = os.environ.get("SHOP_DB", "shop.db")
ITEMS = ("cup", "kettle", "tea")
FULL = 20
"""How many of each item there are after a restock."""


@contextmanager
def connected() -> Iterator[sqlite3.Connection]:
    """Yield a connection of its own, so that any thread may call this."""
    with closing(sqlite3.connect(FILE, timeout=10, isolation_level=None)) as shop:
        shop.row_factory = sqlite3.Row
        yield shop


@contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    """Yield a connection, and commit at the end of the block; if it raises, roll back."""
    with connected() as shop:
        shop.execute("BEGIN IMMEDIATE")  # before it reads, so that what it has read stays true
        with shop:
            yield shop


def create_tables() -> None:
    """Create the tables unless they exist; every instance calls this when it starts."""
    with transaction() as shop:
        shop.execute(
            "CREATE TABLE IF NOT EXISTS placed (id TEXT PRIMARY KEY, item TEXT, count INTEGER, packed_by TEXT)"
        )
        shop.execute("CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, count INTEGER CHECK (count >= 0))")
        shop.executemany("INSERT OR IGNORE INTO stock VALUES (?, ?)", [(item, FULL) for item in ITEMS])


def place(order: str, item: str, count: int) -> sqlite3.Row:
    """Keep an order, unless there is one with this id; return what is kept."""
    with transaction() as shop:
        shop.execute("INSERT OR IGNORE INTO placed (id, item, count) VALUES (?, ?, ?)", (order, item, count))
        row: sqlite3.Row = shop.execute("SELECT * FROM placed WHERE id = ?", (order,)).fetchone()
        return row


def find(order: str) -> sqlite3.Row | None:
    """Return an order, or None if there is none with this id."""
    with connected() as shop:
        row: sqlite3.Row | None = shop.execute("SELECT * FROM placed WHERE id = ?", (order,)).fetchone()
        return row


def pack(order: str, packer: str) -> bool:
    """Take an order's items from the stock, unless it is packed already; return False if there are too few."""
    with transaction() as shop:
        row = shop.execute("SELECT * FROM placed WHERE id = ?", (order,)).fetchone()
        if row["packed_by"] is not None:
            return True  # by an earlier delivery of the same message
        taken = shop.execute(
            "UPDATE stock SET count = count - :count WHERE item = :item AND count >= :count",
            {"item": row["item"], "count": row["count"]},
        )
        if taken.rowcount == 0:
            return False
        shop.execute("UPDATE placed SET packed_by = ? WHERE id = ?", (packer, order))
        return True


def restock(token: int) -> int:
    """Fill the stock up; return how many items were low. A leader of an older term is refused."""
    with transaction() as shop:
        Fence(shop).check("stock", token)  # raises TermLost if a newer leader has written
        return shop.execute("UPDATE stock SET count = ? WHERE count < ?", (FULL, FULL)).rowcount


def stock() -> dict[str, int]:
    """Return how many of each item there are."""
    with connected() as shop:
        return dict(shop.execute("SELECT item, count FROM stock").fetchall())
