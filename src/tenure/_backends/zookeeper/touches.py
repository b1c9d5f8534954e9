"""How long a session certainly lasts: which of our requests the *leader* of the ensemble has heard of.

The leader ends a session if it has not heard of it for the session's time-out. It hears of a session through the server
to which the client is connected, and not at once:

- A follower notes which sessions were heard of ("touched"). It tells the leader with its answer to the leader's next
  ping, and the leader pings every half tick. No other request carries touches: a write that goes through the leader
  proves that the session is alive there, and does not extend it.
- If the follower is cut off right after it answered us, the leader never hears of that.
- Connecting, for the first time or again, goes through the leader, and extends the session at once. But a leader that
  was replaced, and doesn't know that yet, lets a known session connect, too.

So an answer proves nothing about its own request. But a follower sends its touches and our later requests to the leader
in order. If it answered us a tick ago, it has answered a ping since; and if a write of ours has gone through the leader
*after* that, then it was still connected to this leader, which so has heard of the earlier answer. Any write on a
connection proves that the leader has heard of the connecting.

Therefore the session certainly lasts until its time-out after the newest request that was answered at least a tick
before a later write was sent. While a session carries places, a request goes out every :data:`EVERY` ticks, and one a
tick before the next renewal is likely. So what is certain is less than the session's time-out: at a renewal by a bit
more than a tick, and at any other moment, as when a candidate comes to the front, by up to 2.25 ticks.

A successor waits for the end of the session of a dead leader. So sessions are as long as their leases, and what is
certain is less than a whole lease, see ``proof``; those of leases that are short in ticks are longer, so that enough is
left of these.
"""

from __future__ import annotations

import math
from collections import deque

EVERY = 1.25
"""Ticks between the requests of a session that is in use, at most."""
EVERY_SHARE = 1 / 6
"""The share of the session's time between them, at most: of a short lease, no more is uncertain."""
HEARD_AFTER = 1.0
"""Ticks after which the leader has heard of an answered request: half a tick to the next ping, and as much to spare."""
NOTED_EVERY = 1 / 64
"""Ticks between answers that are noted: with each one, a busy session would forget all those that are a tick old."""
BEYOND = 1.25
"""Ticks by which the session of the shortest leases, those of two ticks, lasts longer than these."""
BEYOND_SHARE = 1 / 4
"""The share by which this is less for each tick that a lease is longer; from seven ticks on, it is nothing."""
RENEWED_EARLY = 0.9
"""The share of the time between two renewals after which the next one may come: this time varies by a tenth."""


def session_of(lease: float, tick: float) -> float:
    """Return the time-out of a session for leases of so many seconds."""
    return max(lease, lease - BEYOND_SHARE * lease + (BEYOND + 2 * BEYOND_SHARE) * tick)


def lease_in(session: float, tick: float) -> float:
    """Return the longest lease for which a session of so many seconds lasts long enough; see ``session_of``."""
    return min(session, (session - (BEYOND + 2 * BEYOND_SHARE) * tick) / (1 - BEYOND_SHARE))


class Touches:
    """The requests of one session that were answered, and the newest that the leader has heard of.

    Args:
        tick: The ensemble's tick in seconds.
    """

    def __init__(self, tick: float) -> None:
        self._heard_after = HEARD_AFTER * tick
        self._noted_every = NOTED_EVERY * tick
        self._answered: deque[tuple[float, float]] = deque(maxlen=1_024)  # sent at, answered at; the oldest first
        self.heard_at: float = -math.inf
        """When the newest request was sent that the leader has certainly heard of."""

    def connected(self, sent_at: float) -> None:
        """Note a connection that was asked for at *sent_at*. The server before it may never have told the leader."""
        self._answered.clear()
        self._answered.append((sent_at, sent_at - self._heard_after))  # the first write on it is proof enough

    def answered(self, sent_at: float, answered_at: float) -> None:
        """Note the answer to a request."""
        if not self._answered or answered_at - self._answered[-1][1] >= self._noted_every:
            self._answered.append((sent_at, answered_at))

    def written(self, sent_at: float) -> None:
        """Note the answer to a write that was sent at *sent_at*, on this connection."""
        while self._answered and self._answered[0][1] + self._heard_after <= sent_at:
            self.heard_at = max(self.heard_at, self._answered.popleft()[0])

    def write_at(self, heard_at: float) -> float:
        """Return when to send a write that proves that the leader has heard of a request sent after *heard_at*.

        Infinity if no such request was answered.
        """
        for sent_at, answered_at in self._answered:
            if sent_at >= heard_at:
                return answered_at + self._heard_after
        return math.inf
