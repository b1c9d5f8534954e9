"""Write the tables of times in docs/production.md, from tenure's own defaults. ``--check`` only compares."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tenure import RetryPolicy, Timing
from tenure._backends.zookeeper.touches import session_of
from tenure._election.acquire_times import outage_pause
from tenure._jitter import later
from tenure._queue.options import ConsumeSettings
from tenure._queue.retry import delay_after

PAGE = Path(__file__).resolve().parent.parent / "docs" / "production.md"

TTLS = (5.0, 10.0, 15.0, 30.0, 60.0)
LOCKS = (5.0, 30.0, 60.0, 300.0)

TICK = 2.0
"""ZooKeeper's usual tick, in seconds."""

DELIVERIES = 10
"""Deliveries of a message before it is a dead letter, unless declared otherwise."""


class Fixed:
    """A source of "random" numbers that are always the same, for the ends of a range."""

    def __init__(self, value: float) -> None:
        self._value = value

    def random(self) -> float:
        return self._value


MOST = Fixed(1.0)
NONE = Fixed(0.0)


# --- the formulas of the page -----------------------------------------------------------------------------------------


def survived_pause(timing: Timing) -> float:
    """Return the longest pause of the whole process that ends no term, whenever it begins."""
    return timing.work_window - timing.renew_every


def survived_outage(timing: Timing) -> float:
    """Return the longest time without answers of the store, or with a blocked loop, that ends no term."""
    return timing.work_window - timing.renew_every - timing.retry_every


def succeeded_first(timing: Timing) -> float:
    """Return the shortest time from the last act of a leader that vanished to its successor."""
    return timing.ttl - timing.renew_every


def succeeded_with_hints(timing: Timing) -> float:
    """Return the longest, where the store tells how long a lease lasts."""
    return timing.ttl + timing.retry_every / 10


def succeeded_by_polls(timing: Timing) -> float:
    """Return the longest, where candidates neither get hints nor learn how long a lease lasts."""
    return timing.ttl + later(timing.retry_every, MOST)


def succeeded_on_etcd(timing: Timing) -> float:
    """Return the longest on etcd, which counts whole seconds, and ends a lease up to one later."""
    return math.ceil(timing.ttl) + 1


def succeeded_on_zookeeper(timing: Timing) -> float:
    """Return the longest in an ensemble of ZooKeeper."""
    return session_of(timing.ttl, TICK) + 1.5 * TICK


def handed_over_by_polls(timing: Timing) -> float:
    """Return the longest from a release to the next leader, without hints."""
    return later(timing.retry_every, MOST)


def back_after_outage(timing: Timing) -> float:
    """Return the longest from the return of a store, that was silent for a ``ttl``, to the next leader.

    The last request before its return may have to be given up first.
    """
    return timing.retry_every + later(outage_pause(timing), MOST)


def retries(rng: Fixed) -> float:
    """Return the time that a message which always fails at once spends waiting, until it is a dead letter."""
    return sum(delay_after(number, RetryPolicy(), rng) for number in range(1, DELIVERIES))


# --- the tables -------------------------------------------------------------------------------------------------------


def s(seconds: float) -> str:
    return f"{seconds:.2f}".rstrip("0").rstrip(".")


def trust() -> list[list[str]]:
    return [
        [
            "`ttl`",
            "`renew_every`",
            "`retry_every`",
            "`margin`",
            "`grace`",
            "work is cancelled",
            "trust ends",
            "attempts",
        ],
        *(
            [
                s(one.ttl),
                s(one.renew_every),
                s(one.retry_every),
                s(one.margin),
                s(one.grace),
                s(one.work_window),
                s(one.window),
                str(one.attempts),
            ]
            for one in map(Timing, TTLS)
        ),
    ]


def survives() -> list[list[str]]:
    return [
        ["`ttl`", "store silent, or loop blocked", "process paused", "store silent: ends every term"],
        *(
            [s(one.ttl), *map(s, (survived_outage(one), survived_pause(one), one.work_window))]
            for one in map(Timing, TTLS)
        ),
    ]


def fail_over() -> list[list[str]]:
    return [
        ["`ttl`", "with hints", "Azure Storage", "etcd, at most", "ZooKeeper, at most", "a lost answer adds"],
        *(
            [
                s(one.ttl),
                f"{s(succeeded_first(one))} to {s(succeeded_with_hints(one))}",
                f"{s(succeeded_first(one))} to {s(succeeded_by_polls(one))}" if 15 <= one.ttl <= 60 else "impossible",
                s(succeeded_on_etcd(one)),
                s(succeeded_on_zookeeper(one)) if one.ttl <= 40 else "40 is the longest `ttl`",
                s(one.retry_every),
            ]
            for one in map(Timing, TTLS)
        ),
    ]


def hand_over() -> list[list[str]]:
    return [
        ["`ttl`", "with hints or a queue", "without hints", "asked by `tenure resign`", "the store was away"],
        *(
            [
                s(one.ttl),
                "at once",
                f"up to {s(handed_over_by_polls(one))}",
                f"{s(one.retry_every / 4)} with hints, {s(one.renew_every)} without",
                f"up to {s(back_after_outage(one))}",
            ]
            for one in map(Timing, TTLS)
        ),
    ]


def locks() -> list[list[str]]:
    return [
        ["`lock`", "renewed every", "the handler is cancelled", "redelivered after a crash", "grace of a drain"],
        *(
            [
                s(one.ttl),
                s(one.renew_every),
                s(one.work_window),
                f"{s(succeeded_first(one))} to {s(one.ttl)}",
                f"{s(ConsumeSettings().grace)} + {s(2 * one.grace)}",
            ]
            for one in map(Timing, LOCKS)
        ),
    ]


def dead() -> list[list[str]]:
    lock = Timing(30.0)
    return [
        ["A message whose handler", "is a dead letter after about"],
        ["raises at once, each time", f"{s(retries(MOST))} to {s(retries(NONE))} s of waiting"],
        [
            "kills its process, each time, at once",
            f"{s(DELIVERIES * lock.ttl)} s with `lock=30`, {s(DELIVERIES * 300.0)} s with `lock=300`",
        ],
        ["hangs", f"{DELIVERIES} × `max_hold`: {s(DELIVERIES * ConsumeSettings().max_hold / 3600)} h; set `max_hold`"],
    ]


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "trust": trust,
    "survives": survives,
    "fail-over": fail_over,
    "hand-over": hand_over,
    "locks": locks,
    "dead": dead,
}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def written(page: str) -> str:
    """Return *page* with its tables written anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- timing: {name} -->", "<!-- end -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed) or begin in after:
            raise SystemExit(f"docs/production.md needs one place for the table {name!r}, between {begin} and {end}")
        page = f"{before}{begin}\n\n{markdown(table())}\n{end}{after}"
    return page


def main() -> int:
    before = PAGE.read_text(encoding="utf-8")
    after = written(before)
    if sys.argv[1:] == ["--check"]:
        if before == after:
            return 0
        print("docs/production.md differs from the times; run: python scripts/timing_tables.py", file=sys.stderr)
        return 1
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
