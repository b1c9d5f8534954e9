"""Answers of the scripts of Redis, in which others may have written each text."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from tenure._backends.redis.leases import RedisLeases, _held, _seen
from tenure._backends.redis.message_format import (
    _encoded_head,
    claim_of,
    dead_message,
    deaths_of,
    deliveries_of,
    encoded_dead_letters,
    encoded_failure,
    live_message,
    seconds_of,
)
from tenure._backends.redis.settings import encoded_setting, settings_of
from tenure._backends.redis.tokens import holder_of, new_token
from tenure._backends.redis.wake import QUIET_MAX, quiet_of
from tenure._lease import TOKEN_MAX, Granted
from tenure._queue.broker import QueueSettings
from tenure.errors import ConfigError
from tests.fuzz.decoder import Decoder
from tests.fuzz.using import (
    FAILURE,
    NOW,
    SENT,
    always,
    as_bytes,
    as_number,
    as_objects,
    as_text,
    drive,
    use_delivery,
    use_died,
    use_lease,
    use_message,
    use_moment,
    use_text,
)

MS = int(NOW * 1_000)
TOKEN = "0123456789abcdef0123@1800000000.000@host:17"
"""As :func:`new_token` makes it, but always the same."""
assert re.fullmatch(r"[0-9a-f]{20}@[0-9]+\.[0-9]{3}@\S+", new_token())

ROWS = [f"2|{MS}|3|0|l|{TOKEN}|s".encode(), f"0|{MS}|0|0|q||".encode(), f"1|{MS}|0|5|d||ä".encode()]
HEADS = [_encoded_head(one).encode() for one in SENT]
DEATH = json.dumps(["rejected", "by its handler", MS]).encode()
LINES = f"1|{MS}|abandoned|{encoded_failure(FAILURE)}\n2|{MS}|expired|".encode()
DIED = [b"5|2|expired|order-17", b"6|3|max_deliveries|"]


def texts_of(given: Any) -> tuple[list[Any], ...]:
    """Return the texts of each message: the rows, the heads, the bodies, the deaths, the histories."""
    found = [(*as_objects(one), None, None, None, None, None)[:5] for one in as_objects(given)[:200]]
    parts = [[None if one is None else as_bytes(one) for one in part] for part in zip(*found, strict=True)]
    return tuple(parts) if parts else ([], [], [], [], [])


def read_messages(given: Any) -> None:
    rows, heads, bodies, deaths, lines = texts_of(given)
    sequences = [str(number).encode() for number in range(1, len(rows) + 1)]
    for some_heads in (heads, []):
        found = list(deliveries_of("orders", "token", NOW, [sequences, rows, some_heads, bodies]))
        assert len(found) == len(rows)
        for one, row in zip(found, rows, strict=True):
            use_delivery(one)
            for letter in (b"r", b"l", b"d", b"f"):
                use_message(live_message(one, row, letter, MS))
    dead = list(deliveries_of("orders$dead", "token", NOW, [sequences, rows, heads, bodies, deaths, lines]))
    for one in dead:
        use_delivery(one)
        assert repr(dead_message("orders", one))
    assert all(as_bytes(one) is not None for one in encoded_dead_letters(dead, lines))


def read_claim(given: Any) -> None:
    until, due_in, died, limited, held_up_for = [*as_objects(given), 0, 0, 0, 0, 0][:5]
    reported = [as_bytes(one) for one in as_objects(died)]
    numbers = [as_number(one) for one in (until, due_in, limited, held_up_for)]
    claim = claim_of("orders", "token", [*numbers[:2], [[], [], [], []], [], reported, *numbers[2:]])
    assert repr(claim)
    use_died(claim.died)
    use_died(deaths_of("orders", reported))
    for one in (claim.due_in, claim.held_up_for, seconds_of(numbers[0])):
        use_moment(one or 0.0)


def read_lease(given: Any) -> None:
    holder, token, remaining, written, asked = [*as_objects(given), b"", b"", 0, b"", b""][:5]
    texts = as_bytes(holder), as_bytes(token), as_number(remaining), as_bytes(written)
    use_lease(_held("chair", [0, *texts]))
    use_lease(_seen("chair", [1, *texts, as_bytes(asked)]))
    use_lease(_seen("chair", [0, texts[1], texts[2]]))


def read_granted(given: Any) -> None:
    won, token, asked = [*as_objects(given), b"", b"", b""][:3]
    leases = cast(Any, RedisLeases.__new__(RedisLeases))
    leases._client = leases._wake = leases  # it answers itself
    leases.now, leases.found = lambda: 0.0, lambda *_: None
    leases.run = always([as_number(won) or 1, as_bytes(token), as_bytes(asked)])
    leases._lua, leases._listed, leases._keys = {"acquire": None}, {"chair"}, lambda name: [f"{name}l", f"{name}t"]
    granted = drive(leases.acquire("chair", "ann#1", 15.0))
    assert isinstance(granted, Granted)
    assert 0 <= granted.grant.token <= TOKEN_MAX


def read_settings(given: Any) -> None:
    fields = given if isinstance(given, dict) else {"lock": given}
    found = settings_of({as_bytes(name): as_bytes(one) for name, one in fields.items()})
    assert repr(QueueSettings(**found))
    assert settings_of({name.encode(): encoded_setting(one).encode() for name, one in found.items()}) == found


def read_token(given: Any) -> None:
    name, since = holder_of(as_text(given))
    use_text(name or "")
    use_moment(since or 0.0)


def read_hint(given: Any) -> None:
    for data in (given, as_bytes(given)):
        quiet = quiet_of(data)
        assert quiet is None or 0 <= quiet <= QUIET_MAX


SETTINGS = {
    "lock": 20.0,
    "max_deliveries": 3,
    "dedupe_window": 60.0,
    "body_max": 1_000,
    "dead_retention": 1e999,
    "max_locked": 5,
    "rate": (5, 1.0),
    "session_rate": (1, 0.5),
    "paused": True,
}
MESSAGES = [[row, head, b"body", DEATH, LINES] for row in ROWS for head in HEADS]
LEASES = [[b"ann#1", b"17", 15_000, '{"at": "Zürich"}'.encode(), b"1"], [b"a", b"7", -1, b"", b""]]

DECODERS = [
    Decoder("redis.messages", [MESSAGES], read_messages, share=0.7),
    Decoder("redis.claim", [[MS, 5_000, DIED, 1, 0], [MS, -1, DIED, 2, -1]], read_claim),
    Decoder("redis.lease", LEASES, read_lease),
    Decoder("redis.granted", [[1, b"17", b"1"]], read_granted, (ConfigError,)),
    Decoder("redis.settings", [{name: encoded_setting(one) for name, one in SETTINGS.items()}], read_settings),
    Decoder("redis.token", [TOKEN, "0123456789"], read_token),
    Decoder("redis.hint", [b"5", b"100", b"acquired"], read_hint),
]
