"""Balances of accounts from a stream of moves: each part of the stream has one owner, which keeps its balances.

python stream.py send 10000    # random moves on fifty accounts
python stream.py own           # in as many shells as you like
python stream.py balances
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import tenure
from tenure.backends.sqlite import Fence

URL = os.environ.get("TENURE_URL", "sqlite:///stream.db")
PARTITIONS = 8  # stays the same for ever; more than there will be processes
SCHEMA = """
CREATE TABLE IF NOT EXISTS account (name TEXT PRIMARY KEY, partition TEXT, balance INTEGER, refused INTEGER);
CREATE TABLE IF NOT EXISTS last_move (partition TEXT PRIMARY KEY, sequence INTEGER);
"""


@dataclass(frozen=True)
class Move:
    account: str
    amount: int


@dataclass
class Account:
    balance: int = 0
    refused: int = 0

    def apply(self, move: Move) -> None:
        """Add the amount, but never go below zero: so the result depends on the order of the moves."""
        if self.balance + move.amount < 0:
            self.refused += 1
        else:
            self.balance += move.amount


class Balances:
    """The accounts of one partition: in memory, and in a database that refuses what a former owner writes late."""

    def __init__(self, database: sqlite3.Connection, term: tenure.PartitionTerm) -> None:
        self._database, self._term = database, term
        with database:
            self._check()  # before the accounts are read: from here on, no former owner can change them
            found = database.execute("SELECT name, balance, refused FROM account WHERE partition = ?", [term.partition])
            self.accounts = {name: Account(balance, refused) for name, balance, refused in found}
            last = database.execute("SELECT sequence FROM last_move WHERE partition = ?", [term.partition]).fetchone()
        self._last_sequence = last[0] if last else None

    def apply(self, move: Move, sequence: int) -> Account:
        """Apply a move; if it is the last one again, as a process died before it completed the message, do nothing."""
        account = self.accounts.setdefault(move.account, Account())
        if sequence == self._last_sequence:
            return account
        account.apply(move)
        with self._database:  # one transaction
            self._check()
            row = (move.account, self._term.partition, account.balance, account.refused)
            self._database.execute("REPLACE INTO account VALUES (?, ?, ?, ?)", row)
            self._database.execute("REPLACE INTO last_move VALUES (?, ?)", (self._term.partition, sequence))
        self._last_sequence = sequence
        return account

    def _check(self) -> None:
        Fence(self._database).check(self._term.partition, self._term.token)  # raises TermLost


async def keep(moves: tenure.Queue, pause: float, term: tenure.PartitionTerm) -> None:
    """Keep the balances of one partition, as long as this process owns it."""
    try:
        # Partitions and sessions have the same names. The session is free when its last owner has ended.
        async with moves.session(term.partition) as session:
            with closing(open_database()) as database:
                balances = Balances(database, term)
                print(f"{term.partition}, term {term.token}: {len(balances.accounts)} accounts", flush=True)
                while True:
                    for message in await session.receive(10, wait=60):
                        await asyncio.sleep(pause)
                        try:
                            move = message.decode(Move)
                        except tenure.DecodeError as error:
                            await message.dead_letter("undecodable", str(error))
                            continue
                        account = balances.apply(move, message.sequence)
                        print(
                            f"{term.partition}, term {term.token}, move {message.sequence}: {move.account} "
                            f"{move.amount:+d}, has {account.balance}",
                            flush=True,
                        )
                        await message.complete()
    except (tenure.TermLost, tenure.LockLost, tenure.Unavailable) as problem:
        print(f"{term.partition}, term {term.token}: {problem}", flush=True)  # it is claimed again after this


async def own(pause: float) -> None:
    print(f"process {os.getpid()} takes part", flush=True)
    async with tenure.connect(URL) as backend:
        moves = backend.queue("moves", lock=5)
        await backend.partitions("accounts", PARTITIONS, ttl=5).run(partial(keep, moves, pause))


async def send(count: int, seed: int) -> None:
    async with tenure.connect(URL) as backend:
        await backend.queue("moves", lock=5).send_batch(
            [
                tenure.Outgoing.json(move, session=tenure.partition_of(move.account, PARTITIONS))
                for move in random_moves(count, seed)
            ]
        )


def random_moves(count: int, seed: int) -> Iterator[Move]:
    rng = random.Random(seed)
    for _ in range(count):
        yield Move(f"account-{rng.randrange(50)}", rng.randint(-100, 100))


def open_database() -> sqlite3.Connection:
    database = sqlite3.connect("balances.db", timeout=30)
    database.executescript(SCHEMA)
    return database


def show() -> None:
    with closing(open_database()) as database:
        for name, balance, refused in database.execute("SELECT name, balance, refused FROM account ORDER BY name"):
            print(f"{name}: {balance}, {refused} moves refused")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    owning = commands.add_parser("own", help="own a share of the partitions, until SIGTERM or Ctrl-C")
    owning.add_argument("--pause", type=float, default=0.05, help="seconds that the work on a move takes: 0.05")
    sending = commands.add_parser("send", help="send random moves")
    sending.add_argument("count", type=int)
    sending.add_argument("--seed", type=int, default=1)
    commands.add_parser("balances", help="show all balances")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parsed()
    match given.command:
        case "own":
            asyncio.run(own(given.pause))
        case "send":
            asyncio.run(send(given.count, given.seed))
        case "balances":
            show()
