"""How the consumers and the streams of queues must be set: administrators may change both while they are used.

A consumer is looked at when a process first uses it, now and then before a claim, and when the server delivers a
message again: its lock may have ended early. What was changed is set back, and reported. If this user may not do that,
a claim fails, unless the change breaks no promise. A pause is left alone: it delays messages, and ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tenure._backends.nats.client import Client, Json, part_of
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import (
    NO_CONSUMER,
    NO_LEADER,
    NO_STREAM,
    NoJetStream,
    NotPermitted,
    Refusal,
    WrongConsumer,
)
from tenure._foreign import a_count, read_or
from tenure._opened import Fact
from tenure._runtime.clock import Clock

CHECKED_FOR = 30.0
"""Seconds for which a consumer is not looked at again before a claim."""

BODY_MAX = 1_000_000
"""Bytes of the longest body."""

WINDOW_MIN = 120.0
"""Seconds: the shortest window in which a stream remembers ids; those of copies must be remembered for longer than most
locks last. (``inbox`` makes shorter ones.)"""

REQUIRED: Mapping[str, object] = {
    "ack_policy": "explicit",
    "deliver_policy": "all",
    "max_deliver": -1,
    "max_ack_pending": -1,
    "filter_subject": "",
    "filter_subjects": [],
    "backoff": [],
    "headers_only": False,
    "inactive_threshold": 0,
    "max_batch": 0,
    "max_expires": 0,
    "max_bytes": 0,
}
"""What a consumer must have, beside its ``ack_wait``; what an answer leaves out is so."""

HARMLESS = frozenset({"max_ack_pending", "inactive_threshold"})
"""Fields that make messages wait, at most."""

SHORTENS_LOCKS = frozenset({"ack_wait", "backoff"})

_DURATIONS = frozenset({"ack_wait", "inactive_threshold", "max_expires"})


@dataclass(frozen=True, slots=True)
class Consumer:
    """The consumer of a queue's stream."""

    name: str
    ack_wait: float
    """Seconds for which the server locks a message, unless told otherwise."""
    is_ours: bool = True
    """Whether tenure has made it; another program's is used as it is."""


def changed_in(config: Json, ack_wait: float) -> dict[str, object]:
    """Return the fields of a consumer that are not as tenure has set them, with the values that they must have."""
    required = {"ack_wait": round(ack_wait * 10**9), **REQUIRED}
    return {name: value for name, value in required.items() if config.get(name, value) != value}


def written(name: str, value: object) -> str:
    """Return the value of a field as text, durations in seconds."""
    if value and name in _DURATIONS and isinstance(value, int):
        return f"{value / 10**9:g} s"
    return f"{value}"[:80] if value else "none"


def changes_of(config: Json, changed: Mapping[str, object]) -> str:
    """Return what was changed, as text."""
    return ", ".join(
        f"{name} is {written(name, config.get(name))} instead of {written(name, value)}"
        for name, value in changed.items()
    )


def changes_of_stream(config: Json, subjects: Iterable[str], *, is_dead: bool) -> Iterable[str]:
    """Yield what is wrong with the stream of a queue, or of its dead letters."""

    def number(name: str) -> int:
        return max(0, read_or(a_count, config.get(name), 0))

    lost = "dead letters" if is_dead else "messages"
    if age := number("max_age"):
        yield f"max_age is {age / 1e9:g} s: older {lost} vanish; set it to 0"
    limits = [name for name in ("max_msgs", "max_bytes") if number(name)]
    if limits and config.get("discard") != "new":
        limit = f"{limits[0]} is {number(limits[0])} with discard old"
        yield f"{limit}: when it is full, the oldest {lost} vanish; set it to -1"
    if not is_dead:
        if config.get("retention") != "workqueue":
            yield f"retention is {config.get('retention')}: what is settled stays; make the queue anew"
        if per := number("max_msgs_per_subject"):
            yield f"max_msgs_per_subject is {per}: some messages with one subject vanish, or are refused; set it to -1"
        if (window := number("duplicate_window")) < WINDOW_MIN * 10**9:
            yield f"duplicate_window is {window / 1e9:g} s: a message may come twice; set it to {WINDOW_MIN:g} s"
    elif number("max_msgs_per_subject") != 1:
        yield "max_msgs_per_subject is not 1: a dead letter may be there twice; set it to 1"
    if 0 < (size := number("max_msg_size")) < BODY_MAX + 2**15:
        yield f"max_msg_size is {size}: longer messages can't be sent or delivered again; set it to -1"
    if config.get("sealed") or config.get("no_ack") or config.get("deny_delete"):
        name = next(one for one in ("sealed", "no_ack", "deny_delete") if config.get(one))
        yield f"{name} is set, so queues don't work; make the queue anew"
    given = config.get("subjects")
    if missing := [one for one in subjects if not isinstance(given, list) or one not in given]:
        yield f"it lacks the subject {missing[0]}, so that what is sent there is lost or refused; add it"


def ignore(fact: Fact) -> None:
    """Report nothing."""


class ConsumerCheck:
    """Looks at consumers, and sets back what was changed."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self.report: Callable[[Fact], None] = ignore
        self._checked_at: dict[str, float] = {}  # by the name of the consumer, which no other queue has
        self._told: dict[str, str] = {}  # by the name: what was reported of it and not set back

    def is_due(self, consumer: Consumer) -> bool:
        """Whether *consumer* was not looked at for a while."""
        checked_at = self._checked_at.get(consumer.name, -math.inf)
        return consumer.is_ours and self._clock.now() - checked_at >= CHECKED_FOR

    async def check(
        self, connection: Connection, stream: str, consumer: Consumer, info: Json | None = None
    ) -> frozenset[str]:
        """Set back what was changed of *consumer*; return the fields.

        Args:
            connection: Where to ask.
            stream: The stream of the consumer.
            consumer: The consumer to look at.
            info: What the server has just said of it, if it was asked.

        Raises:
            WrongConsumer: It may not be set back, and a promise would be broken.
            NoJetStream: It is gone.
        """
        if not consumer.is_ours:
            return frozenset()
        if info is None:
            try:
                info = await self._client.call(connection, f"CONSUMER.INFO.{stream}.{consumer.name}")
            except Refusal as error:
                if error.code in (NO_STREAM, NO_CONSUMER):
                    raise NoJetStream from error
                raise
        config = part_of(info, "config")
        changed = changed_in(config, consumer.ack_wait)
        if changed:
            await self._set_back(connection, stream, consumer, config, changed)
        elif info.get("paused"):
            self._tell_once(stream, consumer, f"it is paused until {str(config.get('pause_until'))[:40]}", _PAUSED)
        else:
            self._told.pop(consumer.name, None)
        self._checked_at[consumer.name] = self._clock.now()
        return frozenset(changed)

    async def _set_back(
        self, connection: Connection, stream: str, consumer: Consumer, config: Json, changed: Mapping[str, object]
    ) -> None:
        said = changes_of(config, changed)
        kept = {name: value for name, value in config.items() if REQUIRED.get(name, value) != [] and name != "name"}
        wanted = {**kept, **{name: value for name, value in changed.items() if value != []}}
        wanted["durable_name"] = consumer.name
        if wanted.get("filter_subject") == "":
            del wanted["filter_subject"]
        try:
            answer = await self._client.call(
                connection,
                f"CONSUMER.DURABLE.CREATE.{stream}.{consumer.name}",
                {"stream_name": stream, "config": wanted},
            )
            left = changed_in(part_of(answer, "config"), consumer.ack_wait)
        except (Refusal, NoJetStream, NotPermitted) as error:
            if isinstance(error, Refusal) and error.code in (NO_STREAM, NO_CONSUMER, NO_LEADER):
                raise
            left = dict(changed)
        if not left:
            self._told.pop(consumer.name, None)
            self.report(Fact(_named(stream, consumer), said, "tenure has set it back", "nats-queue-consumer"))
        elif HARMLESS.issuperset(left):
            self._tell_once(stream, consumer, changes_of(config, left), f"this user can't set it back; {_EDIT}")
        else:
            raise WrongConsumer(
                f"{_named(stream, consumer)} was changed: {changes_of(config, left)}; this user can't set it back; "
                f"{_EDIT}"
            )

    def _tell_once(self, stream: str, consumer: Consumer, said: str, advice: str) -> None:
        if self._told.get(consumer.name) != said:
            self._told[consumer.name] = said
            self.report(Fact(_named(stream, consumer), said, advice, "nats-queue-consumer"))


def _named(stream: str, consumer: Consumer) -> str:
    return f"consumer {consumer.name} of {stream}"


_PAUSED = "until then, it delivers nothing; nats consumer resume ends that"
_EDIT = "use nats consumer edit, or let a user with that right receive"
