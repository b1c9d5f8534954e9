"""Receiving messages and sessions; each claim also gives back earlier ones whose answer was lost."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from tenure._backends.redis.claims import Claims
from tenure._backends.redis.message_format import claim_of, deaths_of, milliseconds, seconds_of
from tenure._backends.redis.queue_scripts import QueueScripts, is_dead
from tenure._backends.redis.tokens import new_token
from tenure._queue.broker import Claim, NoSession
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.generations import Generations
from tenure._queue.message import Died, SessionLock
from tenure._queue.verdicts import LAPSED, Lapsed
from tenure.errors import Unavailable

PARTS_MAX = 80
"""The most scripts that one claim runs to get past expired messages: each script applies a part of what is due."""
DIED_MAX = 1_000
"""A claim that has found so many deaths returns them; the rest is left to the next claim."""
SURVEYED_MAX = 100
"""How many queues one script looks at: it blocks the server meanwhile."""
STRANGE_MAX = 20
"""Sessions with a name that is no text that are accepted at most to get past them."""
SESSION_LOST = 300.0
"""Seconds for which a lost claim of a session is looked for: the claim doesn't state how long the session's lock is."""


class Receiving:
    """Claims messages and sessions; remembers the claims of this process that had no answer."""

    def __init__(self, scripts: QueueScripts, generations: Generations) -> None:
        self._scripts = scripts
        self._generations = generations
        self._claimed: dict[str, Claims] = {}
        self._unreported: dict[str, list[Died]] = {}  # deaths found by a claim of which a later part failed

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        died = self._unreported.pop(queue, [])
        try:
            for _ in range(PARTS_MAX):
                claim = await self._receive_part(queue, limit, lock)
                died += claim.died
                if claim.deliveries or claim.due_in != 0.0 or len(died) >= DIED_MAX:
                    return claim._replace(died=died) if died else claim
                # The script has applied a part of what is due, and found nothing to claim.
        except BaseException:
            if died:
                self._unreported.setdefault(queue, []).extend(died)
            raise
        return Claim((), 0.0, died)

    async def _receive_part(self, queue: str, limit: int, lock: float) -> Claim:
        token = new_token()
        with self._claims(queue).asking(lock, token) as asking:
            answer = await self._scripts.run(
                "receive",
                queue,
                *(limit, milliseconds(lock), token, int(is_dead(queue)), asking.lane),
                *asking.arguments,
            )
            asking.found = answer[3]
        self._generations.note(queue.removesuffix(DEAD_SUFFIX), answer.pop())
        return claim_of(queue, token, answer)

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        """Tell which of *queues* hold messages, in one round trip; in a cluster, in one for each node."""
        holding: list[bool] = []
        for answer in await self._scripts.run_on_many("holding", queues, SURVEYED_MAX):
            # Of a queue whose node can't be reached, its own consumer finds that out by a claim.
            holding += [True] if isinstance(answer, Unavailable) else [bool(one) for one in answer]
        return holding

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        token = new_token()
        with self._claims(queue).asking(lock, token) as asking:
            answer = await self._scripts.run(
                "receive_deferred",
                queue,
                *(milliseconds(lock), token, asking.lane, len(sequences)),
                *sequences,
                *asking.arguments,
            )
            asking.found = answer[3]
        self._generations.note(queue.removesuffix(DEAD_SUFFIX), answer.pop())
        return claim_of(queue, token, answer)

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        for _ in range(STRANGE_MAX):
            held = await self._accept_one(queue, session, lock)
            if held is not None:
                return held
        return NoSession(0.0)

    async def _accept_one(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession | None:
        """Accept a session; None if its name is no text: another program's, which stays locked for so long."""
        token = new_token()
        with self._claims(queue).asking(lock, token) as asking:
            answer = await self._scripts.run(
                "accept",
                queue,
                *(milliseconds(lock), token, int(session is not None), session or "", asking.lane),
                *asking.arguments,
            )
            asking.found = answer[0]
        self._generations.note(queue, answer.pop())
        _, is_accepted, *rest = answer
        if not is_accepted:
            due_in, died, is_held_back = rest
            return NoSession(seconds_of(due_in), deaths_of(queue, died), bool(is_held_back))
        until, name, state = rest
        try:
            return SessionLock(queue, name.decode(), token, until / 1_000, state)
        except UnicodeDecodeError:
            return None

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        with self._claims(held.queue).asking(SESSION_LOST) as asking:
            answer = await self._scripts.run(
                "receive_session",
                held.queue,
                *(held.session, held.token, limit, asking.lane, asking.mark),
                *asking.arguments,
            )
            asking.found = answer[3] if answer[0] else answer[1]
        return claim_of(held.queue, held.token, answer) if answer[0] else LAPSED

    def forget(self, queue: str) -> None:
        """Forget the lost claims of *queue*: it was deleted."""
        self._claimed.pop(self._scripts.base(queue), None)

    def _claims(self, queue: str) -> Claims:
        base = self._scripts.base(queue)
        claims = self._claimed.get(base)
        if claims is None:
            claims = self._claimed.setdefault(base, Claims(secrets.token_hex(6)))
        return claims
