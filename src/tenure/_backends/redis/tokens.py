"""The tokens of claims. Each tells people who look at a lock which process made the claim, and when by its clock."""

from __future__ import annotations

import math
import re
import secrets
import time

from tenure._foreign import a_text, read_or, seconds
from tenure._runtime.process_name import process_name

_UNSAFE = re.compile(r"[^!-{}~]")  # the scripts separate fields by |, and tokens have no spaces


def new_token() -> str:
    """Return a token that no other claim has."""
    return f"{secrets.token_hex(10)}@{time.time():.3f}@{_UNSAFE.sub('?', process_name())}"


def holder_of(token: str) -> tuple[str | None, float | None]:
    """Return the process of a token, and its time; None of one of an older version."""
    _, _, rest = token.partition("@")
    since, _, name = rest.partition("@")
    if not name:
        return None, None
    try:
        moment = float(since)
    except ValueError:  # another program's
        moment = math.nan
    return read_or(a_text, name, None), read_or(seconds, moment, None)
