"""Claims whose answer was lost: remembered here, and given back before the next claim on the same queue."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import Connection
from tenure._backends.postgres.functions import QueueFunctions


@dataclass(slots=True)
class _Unanswered:
    """A claim without an answer: the messages that it holds, or may hold later, are to be given back."""

    asked_at: float
    lock: float
    missed_at: float = math.inf  # when the server first found no messages of it


class UnansweredClaims:
    """The claims of this process that got no answer, by queue and token."""

    def __init__(self, client: Client, functions: QueueFunctions) -> None:
        self._client = client
        self._functions = functions
        self._claims: dict[str, dict[int, _Unanswered]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._claims.values()))

    @contextmanager
    def noting(self, queue: str, token: int, lock: float) -> Iterator[None]:
        """Remember the claim with *token* if the block fails: it may hold messages, now or later."""
        asked_at = time.monotonic()
        try:
            yield
        except BaseException:
            self._claims.setdefault(queue, {})[token] = _Unanswered(asked_at, lock)
            raise

    async def give_back(self, queue: str) -> bool:
        """Give back the messages of *queue* that these claims hold; return whether there were any.

        The search for a claim ends when it is found, or can no longer be executed.
        """
        claims = dict(self._claims.get(queue, ()))
        if not claims:
            return False
        statement = self._functions.call_text_with_deaths("give_back", 4)

        async def give_back(connection: Connection) -> tuple[list[int], str | None]:
            now = time.monotonic()  # after the wait for the connection
            ages = [now - claim.asked_at for claim in claims.values()]
            locks = [claim.lock for claim in claims.values()]
            row = await connection.fetchrow(statement, queue, list(claims), ages, locks)
            assert row is not None
            return row[0], row[1]

        found, deaths = await self._client.run(give_back)
        self._functions.deaths.note(queue, deaths)
        left, now = self._claims.get(queue, {}), time.monotonic()
        for token, claim in claims.items():
            # The server may execute it yet: a request sent before a network failure may be delivered after it.
            if token in found or claim.missed_at < now - 3 * self._client.options.timeout:
                left.pop(token, None)
            claim.missed_at = min(claim.missed_at, now)
        if not left:
            self._claims.pop(queue, None)
        return bool(found)
