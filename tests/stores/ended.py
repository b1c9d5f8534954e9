"""A message that is abandoned after a lock that has ended, then dead-lettered; and the JSON of its attempts."""

from __future__ import annotations

from tenure._queue.delivery_ends import EndedDelivery, outcome_of
from tenure._queue.failures import Failure
from tenure._queue.verdicts import Abandon, DeadLetter

ERROR = '{"type": "E", "message": "m", "traceback": "t"}'
ENDED = '{"number": 1, "at": 5.0, "outcome": "expired", "error": null}'
ABANDONED = '{"number": 2, "at": 5.0, "outcome": "abandoned", "error": ' + ERROR + "}"
REJECTED = '{"number": 3, "at": 6.0, "outcome": "rejected", "error": null}'

AT_ABANDON = outcome_of(Abandon(0.0, Failure("E", "m", "t")), EndedDelivery(2), 9, 5.0)
AT_DEATH = outcome_of(DeadLetter("bad", "why"), EndedDelivery(3), 9, 6.0)
