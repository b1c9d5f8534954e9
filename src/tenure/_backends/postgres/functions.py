"""Calls of the functions that the schema has for queues, and the deaths that such calls find."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tenure._backends.postgres.client import Client
from tenure._foreign import a_count, a_list, a_text, read_json, read_or
from tenure._queue.checks import COUNT_MAX
from tenure._queue.generations import Generations
from tenure._queue.identity import ID_MARK
from tenure._queue.message import Died
from tenure._queue.notes import read_deliveries, read_reason

DIED_MAX = 10_000
"""The newest deaths of a queue that are kept at most until this process's next claim reports them."""

DEATHS_JSON_MAX = 2**26
"""The longest JSON of deaths that is read: a transaction notes twenty thousand at most."""

_DEATHS = "nullif(current_setting('tenure.died', true), '')"
"""The deaths that the transaction has noted so far; see ``_note_deaths`` in messages.sql."""


_FREED = "nullif(current_setting('tenure.freed', true), '')"
"""Not NULL if the transaction has freed places of a queue with ``max_locked``; see ``_note_freed`` in limits.sql."""


class QueueFunctions:
    """The functions of one schema."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._schema = client.options.schema
        self.deaths = Deaths()
        self.generations = Generations()
        self.made: str = (
            "(SELECT pg_catalog.min(d.xmin::pg_catalog.text::pg_catalog.int8) "
            f"FROM {self._schema}.declared AS d JOIN {self._schema}.queue AS q ON q.id = d.queue WHERE q.name = $1)"
        )
        """What tells the queue $1 from a deleted one, which has the same row: when its first setting was declared."""

    def call_text(self, name: str, arguments: int) -> str:
        """Return a call of the function *name* with $1, $2, … as its *arguments*."""
        places = ", ".join(f"${place}" for place in range(1, arguments + 1))
        return f"{self._schema}.{name}({places})"

    def call_text_with_deaths(self, name: str, arguments: int) -> str:
        """Return a statement that makes the call; its second column is the deaths that the call found."""
        return f"SELECT {self.call_text(name, arguments)}, {_DEATHS}"

    def call_text_with_freed(self, name: str, arguments: int) -> str:
        """Return a statement that makes the call; its second column is not NULL if that has freed places."""
        return f"SELECT {self.call_text(name, arguments)}, {_FREED}"

    async def rows(self, name: str, *values: object) -> list[Any]:
        """Return the rows of a function."""
        return await self._client.fetch(f"SELECT * FROM {self.call_text(name, len(values))}", *values)

    async def rows_about(self, name: str, queue: str, *values: object) -> list[Any]:
        """Return the rows of a function about *queue*, its first argument; note its generation if it is followed."""
        if queue not in self.generations.followed:
            return await self.rows(name, queue, *values)
        call = self.call_text(name, 1 + len(values))
        rows = await self._client.fetch(
            f"SELECT {self.made}, f.* FROM (SELECT) AS x LEFT JOIN LATERAL (SELECT true, c.* FROM {call} AS c) AS f "
            "ON true",
            queue,
            *values,
        )
        self.generations.note(queue, rows[0][0])
        return [row[2:] for row in rows if row[1]]

    async def call_about(self, name: str, queue: str, *values: object) -> Any:
        """Return the result of a function about *queue*, its first argument, and note its generation, as above."""
        if queue not in self.generations.followed:
            return await self.call(name, queue, *values)
        statement = f"SELECT {self.call_text(name, 1 + len(values))}, {self.made}"
        [(answer, made)] = await self._client.fetch(statement, queue, *values)
        self.generations.note(queue, made)
        return answer

    async def call(self, name: str, *values: object) -> Any:
        """Return the result of a function."""
        [row] = await self._client.fetch(f"SELECT {self.call_text(name, len(values))}", *values)
        return row[0]

    async def rows_with_deaths(self, name: str, queue: str, *values: object) -> list[Any]:
        """Return the rows of a function, and note the deaths of *queue* that it found; without rows, one of NULLs."""
        call = self.call_text(name, 1 + len(values))
        follows = queue in self.generations.followed
        made = self.made if follows else "NULL"
        rows = await self._client.fetch(
            f"SELECT (SELECT {_DEATHS}), {made}, f.* FROM (SELECT) AS x LEFT JOIN LATERAL {call} AS f ON true",
            queue,
            *values,
        )
        self.deaths.note(queue, rows[0][0])
        if follows:
            self.generations.note(queue, rows[0][1])
        return [row[2:] for row in rows]

    async def call_with_deaths(self, name: str, queue: str, *values: object) -> Any:
        """Return the result of a function, and note the deaths of *queue* that it found."""
        statement = self.call_text_with_deaths(name, 1 + len(values))
        [(answer, deaths)] = await self._client.fetch(statement, queue, *values)
        self.deaths.note(queue, deaths)
        return answer

    async def call_with_freed(self, name: str, *values: object) -> tuple[Any, bool]:
        """Return the result of a function, and whether it has freed places of a queue with ``max_locked``."""
        [(answer, freed)] = await self._client.fetch(self.call_text_with_freed(name, len(values)), *values)
        return answer, freed is not None

    async def apply_due(self, queue: str) -> None:
        """Apply all that is due, in steps, each of which ends long before the server's time limit."""
        while await self.call_with_deaths("catch_up", queue):
            pass


def _read_deaths(text: str) -> list[tuple[int, str | None, int, str]]:
    found = (read_or(_read_death, one, None) for one in a_list(read_json(text, DEATHS_JSON_MAX)))
    return [one for one in found if one is not None]


def _read_death(value: object) -> tuple[int, str | None, int, str]:
    fields: list[Any] = [*a_list(value), None, None, None, None]
    number, known_as, deliveries, reason = fields[:4]
    name = None if known_as is None else a_text(known_as)
    count = a_count(deliveries, least=-COUNT_MAX - 1)  # an administrator may have lowered it
    return a_count(number), name, read_deliveries(max(0, count)), read_reason(reason)


class Deaths:
    """Deaths that were found in the database, kept by queue until a claim reports them."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[Died]] = {}

    def note(self, queue: str, text: str | None) -> None:
        """Keep the deaths in *text*, as the database encodes them."""
        if text:
            self._kept.setdefault(queue, deque(maxlen=DIED_MAX)).extend(
                Died(number, known_as or f"{queue}{ID_MARK}{number}", deliveries, reason)
                for number, known_as, deliveries, reason in read_or(_read_deaths, text, [])
            )

    def take(self, queue: str) -> Sequence[Died]:
        """Return the kept deaths of *queue*, each once."""
        kept = self._kept.get(queue)
        if not kept:
            return ()
        taken = []
        with suppress(IndexError):  # a loop in another thread may add to it, and take from it
            while True:
                taken.append(kept.popleft())
        return tuple(taken)
