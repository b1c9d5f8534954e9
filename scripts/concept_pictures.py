"""Draw the pictures of docs/concepts.md from runs of the code, and from its tables.

Only places are given by hand. A state, a change or a verdict of the code that has no place on its picture is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache
from textwrap import wrap
from typing import NamedTuple, get_args

from scripts.drawing import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Drawing, Point
from scripts.figure_runs import (
    DEAD,
    EXPIRES,
    GONE,
    NEW,
    VERDICTS,
    Happened,
    lease_times,
    life_of_a_message,
    shares_over_time,
    two_candidates,
)
from tenure._election.machine import TRANSITIONS, State
from tenure._queue.message import STATES
from tenure._queue.verdicts import Verdict
from tenure._timing import Timing

# --- lines of time --------------------------------------------------------------------------------------------------

LEFT = 24.0
A, B = "a", "b"


def seconds(moment: float) -> str:
    """Return a moment as texts show it."""
    return f"{round(moment, 2):g} s"


def falling_notes(picture: Drawing, notes: Sequence[tuple[float, float, str]], below: float) -> None:
    """Draw a line down from each place, and its note to the left of the end: one below the other."""
    for row, (x, top, text) in enumerate(notes):
        y = below + 24 * row
        picture.line((x, top), (x, y + 4))
        picture.text(x - 6, y, text, at="end")


def lease() -> Drawing:
    """Draw the moments of one lease."""
    times, timing = lease_times(), Timing()

    def x(moment: float) -> float:
        return LEFT + 32.5 * moment

    picture = Drawing(
        "The time line of a lease",
        f"A candidate asks at 0 seconds, and is granted a lease of {timing.ttl:g} seconds. It asks to renew it at "
        f"{', '.join(f'{one:g}' for one in times.renewals)} seconds. If there is no answer, its work is cancelled at "
        f"{times.cancelled:g} seconds, and it trusts the lease until {times.trusted_until:g} seconds. The lease ends "
        f"at the store at {times.ends_earliest:g} seconds at the earliest, and here at {times.ends:g} seconds.",
        304,
    )
    for moment, top, end in ((times.asked, 12, 104), (times.granted, 32, 84), (times.renewals[0], 52, 84)):
        picture.line((x(moment), top), (x(moment), end))
    for moment in times.renewals[1:]:
        picture.line((x(moment), 66), (x(moment), 84))
    picture.text(x(times.asked) + 6, 24, f"{seconds(times.asked)}: asks the store; the time is counted from here")
    picture.text(x(times.granted) + 6, 44, f"{seconds(times.granted)}: granted, so the work begins")
    renewals = ", ".join(f"{one:g}" for one in times.renewals[:-1])
    picture.text(x(times.renewals[0]) + 6, 64, f"{renewals}, {seconds(times.renewals[-1])}: asks to renew")
    ends = [
        (x(times.cancelled), 114, f"{seconds(times.cancelled)}: the work is cancelled"),
        (x(times.trusted_until), 114, f"{seconds(times.trusted_until)}: the end of trust; the work must be over"),
        (x(times.ends_earliest), 182, f"{seconds(times.ends_earliest)}: the earliest end of the lease at the store"),
        (x(times.ends), 182, f"{seconds(times.ends)}: the end of the lease at the store, here"),
    ]
    falling_notes(picture, ends, 212)
    picture.line((x(times.asked), 104), (x(times.executed), 148), color=INK, arrow=True)
    picture.line((x(times.executed), 148), (x(times.granted), 116), color=INK, arrow=True)
    picture.box(x(times.granted), 82, x(times.cancelled), 114, BLUE)
    picture.text(x(times.granted) + 10, 103, "candidate: the work runs", color=BLUE, bold=True)
    picture.box(x(times.cancelled), 82, x(times.trusted_until), 114, ORANGE)
    picture.text((x(times.cancelled) + x(times.trusted_until)) / 2, 103, "grace", at="middle", color=ORANGE, bold=True)
    picture.box(x(times.executed), 150, x(times.ends), 182, GREY)
    picture.text(x(times.executed) + 10, 171, f"store: the lease, {seconds(timing.ttl)}", color=GREY, bold=True)
    return picture


def moment_of(run: Iterable[Happened], who: str, what: str, token: int = 0) -> float:
    """Return when *who* did *what*, for the last time."""
    return [one.at for one in run if (one.who, one.what) == (who, what) and token in (0, one.token)][-1]


def out_before_in() -> Drawing:
    """Draw a leader that is cut off, and its successor."""
    run = cut_off()
    cut, cancelled, ended = (moment_of(run, A, what) for what in ("cut off", "cancelled", "work ended"))
    trusted = moment_of(run, A, "trusted until")
    lease_began, lease_ends = (moment_of(run, "store", what, 33) for what in ("granted", "lease ends"))
    next_lease, next_term = moment_of(run, "store", "granted", 34), moment_of(run, B, "began", 34)

    def x(moment: float) -> float:
        return LEFT + 29 * moment

    picture = Drawing(
        "Out before in",
        f"Leader A is cut off from the store at {seconds(cut)}. Its work is cancelled at {seconds(cancelled)}, and A "
        f"trusts its term until {seconds(trusted)}. The lease ends at the store at {seconds(lease_ends)}. Candidate B, "
        f"which asks again then, leads in the next term from {seconds(next_term)}.",
        360,
    )
    falling_notes(
        picture,
        [
            (x(cancelled), 68, f"{seconds(cancelled)}: A cancels its work, which soon ends"),
            (x(trusted), 68, f"{seconds(trusted)}: A trusts its term no longer"),
            (x(lease_ends), 180, f"{seconds(lease_ends)}: the lease of A ends at the store"),
            (x(next_term), 243, f"{seconds(next_term)}: B, which was granted the lease, leads in term 34"),
        ],
        272,
    )
    begun, end = moment_of(run, A, "began", 33), 17.6
    picture.text(LEFT, 28, "candidate A", bold=True)
    picture.box(x(begun), 38, x(cancelled), 68, BLUE)
    picture.text(x(begun) + 30, 58, "leads in term 33", color=BLUE, bold=True)
    picture.box(x(cancelled), 38, x(ended), 68, ORANGE)
    picture.box(x(ended), 38, x(trusted), 68, GREY, open_=True)
    picture.line((x(cut), 38), (x(cut), 112), color=RED, width=2, broken=True)
    picture.text(x(cut) + 8, 106, "cut off from the store, no answers", color=RED)
    for one in run:
        if one.who == A and one.what in ("asked to renew", "asked to release"):
            picture.cross(x(one.at), 82, RED)
    picture.text(LEFT, 140, "store", bold=True)
    picture.box(x(lease_began), 150, x(lease_ends), 180, GREY)
    picture.text(x(lease_began) + 12, 170, "lease of A, term 33", color=GREY, bold=True)
    picture.box(x(next_lease), 150, x(end), 180, GREEN)
    picture.text(LEFT, 210, "candidate B", bold=True)
    for one in run:
        if one.who == B and one.what == "asked to acquire":
            picture.dot(x(one.at), 228, GREEN, open_=one.at < lease_ends)
    picture.text(x(1), 233, "asks, and is refused", color=GREEN)
    picture.box(x(next_term), 213, x(end), 243, GREEN)
    return picture


def fence() -> Drawing:
    """Draw a leader that is paused between a check and a write, and the fence that refuses the write."""
    run = paused()
    stopped, goes_on = moment_of(run, A, "paused"), moment_of(run, A, "goes on")
    trusted, lease_ends = moment_of(run, A, "trusted until"), moment_of(run, "store", "lease ends")
    next_term = moment_of(run, B, "began", 34)
    writes = [one for one in run if one.who == "resource"]
    refused = [one for one in writes if one.what.startswith("refused: token 33 is too old")]
    if not stopped < trusted < goes_on:
        raise ValueError("the leader was not paused from before the end of its trust until after it")
    if [one.token for one in writes] != [33, 34, 33] or refused != writes[-1:]:
        raise ValueError(f"the fence did not refuse the late write: {writes}")

    def x(moment: float) -> float:
        return LEFT + 27 * moment

    picture = Drawing(
        "A fence refuses the late write of an old leader",
        f"Leader A, in term 33, is paused from {seconds(stopped)} to {seconds(goes_on)}. Its trust and its lease end, "
        f"and B writes with token 34 at {seconds(next_term)}. When A goes on, it writes with token 33, and the "
        "resource refuses that.",
        362,
    )
    falling_notes(
        picture,
        [
            (x(trusted), 68, f"{seconds(trusted)}: the trust of A ends; A does not notice"),
            (x(lease_ends), 162, f"{seconds(lease_ends)}: the lease of A ends at the store"),
            (x(next_term), 238, f"{seconds(next_term)}: B leads, and writes with token 34"),
            (x(goes_on), 238, f"{seconds(goes_on)}: A goes on, and writes with token 33: refused"),
        ],
        270,
    )
    begun, end = moment_of(run, A, "began", 33), 18.9
    picture.text(LEFT, 28, "candidate A, term 33", bold=True)
    picture.box(x(begun), 38, x(stopped), 68, BLUE)
    picture.box(x(stopped), 38, x(goes_on), 68, GREY, open_=True)
    picture.text(x(stopped) + 10, 58, "paused after term.check(), before the write", color=GREY)
    picture.box(x(goes_on), 38, x(end), 68, BLUE)
    picture.text(x(stopped), 110, "resource, with a fence", bold=True)
    picture.box(x(begun) - 12, 122, x(end), 162, PURPLE)
    for one in writes[:2]:
        picture.line((x(one.at), 68 if one.token == 33 else 208), (x(one.at), 148 - (one.token - 33) * 12), arrow=True,
                     color=INK)  # fmt: skip
        picture.dot(x(one.at), 142, PURPLE)
    picture.text(x(begun) + 12, 147, "newest token: 33", color=PURPLE)
    picture.text(x(next_term) - 12, 147, "newest token: 34", at="end", color=PURPLE)
    picture.line((x(goes_on), 68), (x(goes_on), 132), color=RED, arrow=True)
    picture.cross(x(goes_on), 144, RED)
    picture.text(LEFT, 198, "candidate B", bold=True)
    picture.box(x(next_term), 208, x(end), 238, GREEN)
    picture.text((x(next_term) + x(end)) / 2, 228, "term 34", at="middle", color=GREEN, bold=True)
    return picture


@cache
def cut_off() -> list[Happened]:
    """Run two candidates, of which the leader is cut off."""
    return two_candidates(fault="cut off", at=1.0, until=18.0)


@cache
def paused() -> list[Happened]:
    """Run two candidates, of which the leader is paused for longer than its lease."""
    return two_candidates(fault="paused", at=2.0, until=18.0)


# --- states ---------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """The points of an arrow, and the place of its label; the label is so many letters wide."""

    points: Sequence[Point]
    x: float
    y: float
    at: str
    wide: int = 99


CANDIDATE: dict[State, tuple[float, float, str]] = {
    State.STANDBY: (90, 82, GREY),
    State.CAMPAIGNING: (470, 82, PURPLE),
    State.LEADING: (470, 330, BLUE),
    State.RENEWING: (470, 454, BLUE),
    State.RESIGNING: (90, 330, ORANGE),
    State.STOPPED: (280, 214, GREY),
}

_TERM_ENDS = {
    "WorkEnded": "work ended",
    "Tick": "no time left",
    "Resign": "resign",
    "Granted": "resign",  # the answer says that this candidate was asked to
    "Lost": "lost",
}

CAUSES: dict[tuple[State, State], dict[str, str]] = {
    (State.STANDBY, State.CAMPAIGNING): {"Tick": "time to ask"},
    (State.STANDBY, State.LEADING): {"Granted": "a yes that comes late, and is still good"},
    (State.STANDBY, State.STOPPED): {"Stop": "stop"},
    (State.CAMPAIGNING, State.STANDBY): {
        "HeldBy": "held by another",
        "NoAnswer": "no answer",
        "Tick": "no answer",
        "Granted": "granted too late",
    },
    (State.CAMPAIGNING, State.LEADING): {"Granted": "granted"},
    (State.CAMPAIGNING, State.STOPPED): {"Stop": "stop"},
    (State.LEADING, State.RENEWING): {"Tick": "time to renew", "RenewTogether": "others do"},
    (State.LEADING, State.RESIGNING): _TERM_ENDS,
    (State.RENEWING, State.LEADING): {
        "Granted": "granted",
        "NoAnswer": "no answer",
        "Tick": "no answer",
        "Released": "no answer",  # it is none to this question
        "RenewalWithheld": "not sent",
    },
    (State.RENEWING, State.RESIGNING): _TERM_ENDS,
    (State.RESIGNING, State.STANDBY): {
        "Released": "lease released",
        **dict.fromkeys(("Lost", "Tick", "WorkEnded"), "over"),
    },
    (State.RESIGNING, State.STOPPED): dict.fromkeys(
        ("Released", "Lost", "Tick", "WorkEnded"), "the same, after a stop"
    ),
}
"""The inputs and answers that change the state so, in words; the tests compare them with what simulations do."""

CANDIDATE_WAYS: dict[tuple[State, State], Way] = {
    (State.STANDBY, State.CAMPAIGNING): Way([(152, 74), (408, 74)], 280, 66, "middle"),
    (State.CAMPAIGNING, State.STANDBY): Way([(408, 90), (152, 90)], 280, 108, "middle", 28),
    (State.STANDBY, State.LEADING): Way([(90, 63), (90, 30), (546, 30), (546, 330), (532, 330)], 280, 24, "middle"),
    (State.STANDBY, State.STOPPED): Way([(110, 101), (236, 195)], 152, 160, "end"),
    (State.CAMPAIGNING, State.STOPPED): Way([(450, 101), (324, 195)], 390, 172, "start"),
    (State.CAMPAIGNING, State.LEADING): Way([(480, 101), (480, 311)], 474, 244, "end"),
    (State.LEADING, State.RENEWING): Way([(430, 349), (430, 435)], 424, 390, "end", 14),
    (State.RENEWING, State.LEADING): Way([(456, 435), (456, 349)], 463, 376, "start", 10),
    (State.LEADING, State.RESIGNING): Way([(408, 330), (152, 330)], 280, 302, "middle", 32),
    (State.RENEWING, State.RESIGNING): Way([(408, 454), (110, 454), (110, 349)], 250, 428, "middle", 32),
    (State.RESIGNING, State.STANDBY): Way([(62, 311), (62, 101)], 68, 222, "start", 15),
    (State.RESIGNING, State.STOPPED): Way([(126, 311), (244, 233)], 196, 278, "start"),
}


def candidate() -> Drawing:
    """Draw the states of a candidate."""
    edges = {(before, after) for before, afters in TRANSITIONS.items() for after in afters}
    require_same("changes of a candidate's state", edges, CANDIDATE_WAYS.keys(), CAUSES.keys())
    require_same("states of a candidate", set(State), CANDIDATE.keys())
    labels = {edge: in_words(causes.values()) for edge, causes in CAUSES.items()}
    sentences = (f"From {before.value} to {after.value}: {label}." for (before, after), label in labels.items())
    picture = Drawing("The states of a candidate", " ".join(sentences), 492)
    _draw_ways(
        picture,
        ((way, "\n".join(wrap(labels[edge], way.wide))) for edge, way in CANDIDATE_WAYS.items()),
    )
    for state, (x, y, color) in CANDIDATE.items():
        picture.labelled(x, y, state.value, color, wide=124)
    return picture


MESSAGE: dict[str, tuple[float, float, str]] = {
    "ready": (150, 175, GREEN),
    "locked": (345, 175, BLUE),
    "delayed": (150, 50, PURPLE),
    "deferred": (440, 50, PURPLE),
    DEAD: (345, 340, RED),
    GONE: (508, 175, GREY),
}

MESSAGE_WAYS: dict[tuple[str, str], Way] = {
    (NEW, "ready"): Way([(128, 250), (128, 194)], 128, 266, "middle"),
    (NEW, "delayed"): Way([(16, 42), (108, 42)], 16, 18, "start"),
    ("delayed", "ready"): Way([(150, 69), (150, 156)], 156, 110, "start"),
    ("delayed", DEAD): Way([(108, 60), (84, 60), (84, 352), (303, 352)], 92, 370, "start"),
    ("ready", DEAD): Way([(108, 175), (84, 175), (84, 352), (303, 352)], 92, 370, "start"),
    ("ready", "locked"): Way([(192, 166), (303, 166)], 240, 160, "middle"),
    ("locked", "ready"): Way([(303, 184), (192, 184)], 206, 204, "start"),
    ("locked", "delayed"): Way([(318, 156), (192, 60)], 258, 76, "start"),
    ("locked", "deferred"): Way([(350, 156), (418, 69)], 372, 110, "end"),
    ("deferred", "locked"): Way([(446, 69), (378, 156)], 428, 112, "start"),
    ("locked", GONE): Way([(387, 175), (466, 175)], 425, 194, "middle"),
    ("locked", DEAD): Way([(345, 194), (345, 321)], 352, 226, "start"),
    (DEAD, GONE): Way([(387, 340), (508, 340), (508, 194)], 434, 358, "middle"),
    (DEAD, "ready"): Way([(303, 330), (172, 330), (172, 194)], 184, 322, "start"),
}
"""Two changes may share a label at the same place."""

LABELS: dict[str, str] = {
    "send": "send",
    "send, delay": "send with\na delay",
    "time: delay": "delay\nends",
    EXPIRES: "expires_in ends",
    "receive": "receive",
    "receive by sequence": "receive by\nits sequence",
    "Complete": "complete",
    "Abandon": "abandon",
    "Abandon, delay": "abandon\nwith a delay",
    "Abandon, last": "at the last delivery:\nabandon, or",
    "GiveBack": "give back",
    "Defer": "defer",
    "DeadLetter": "dead-letter;",
    "time: lock": "lock ends",
    "time: lock, last": "lock ends",
    "redrive": "redrive",
    "purge": "purge",
    "Complete, dead": "complete",
}


def message() -> Drawing:
    """Draw the states of a message."""
    changes = life_of_a_message()
    require_same("states of a message", STATES | {DEAD, GONE}, MESSAGE.keys())
    require_same("verdicts", set(get_args(Verdict)), {type(verdict) for verdict, _ in VERDICTS})
    labels: dict[tuple[str, str], list[str]] = defaultdict(list)
    for change in changes:
        labels[change.before, change.after].append(LABELS[change.act])
    require_same("changes of a message's state", labels.keys(), MESSAGE_WAYS.keys())
    sentences = (f"{before} to {after}: {', '.join(texts)}." for (before, after), texts in labels.items())
    picture = Drawing("The life of a message", " ".join(sentences).replace("\n", " "), 384)
    _draw_ways(picture, ((way, "\n".join(labels[edge])) for edge, way in MESSAGE_WAYS.items()))
    for state, (x, y, color) in MESSAGE.items():
        picture.labelled(x, y, state, color, wide=84)
    return picture


def _draw_ways(picture: Drawing, ways: Iterable[tuple[Way, str]]) -> None:
    labels: dict[tuple[float, float, str, str], None] = {}
    for way, text in ways:
        picture.line(*way.points, color=GREY, arrow=True)
        labels[way.x, way.y, way.at, text] = None
    for x, y, at, text in labels:
        picture.text(x, y, text, at=at)


def in_words(parts: Iterable[str]) -> str:
    """Return different parts as one enumeration."""
    *first, last = dict.fromkeys(parts)
    return f"{', '.join(first)}, or {last}" if first else last


def require_same(what: str, expected: Set[object], *others: Set[object]) -> None:
    for other in others:
        if expected != other:
            raise ValueError(
                f"{what}: the code has {sorted(map(str, expected))}, the picture {sorted(map(str, other))}"
            )


# --- partitions -----------------------------------------------------------------------------------------------------

MEMBERS = [("A", BLUE), ("B", GREEN), ("C", ORANGE), ("D", PURPLE)]


def partitions() -> Drawing:
    """Draw which member works on which partition."""
    shares = shares_over_time()

    def x(moment: float) -> float:
        return 30 + 14.4 * moment

    picture = Drawing(
        "Partitions over time",
        f"Three members own {len(shares.partitions)} partitions. At {seconds(shares.joined)} a fourth joins: one "
        f"partition of each moves to it. At {seconds(shares.killed)} the first is killed: its partitions have no owner "
        "until its leases have ended, and then the other three claim them.",
        362,
    )
    rows = sorted(shares.partitions, key=lambda name: [(one[2], -one[1]) for one in shares.spans[name]])
    for row, name in enumerate(rows):
        top = 48 + 22 * row
        for begin, end, member in shares.spans[name]:
            letter, color = MEMBERS[member]
            picture.box(x(max(begin, 0)), top, x(end), top + 18, color)
            picture.text(x(max(begin, 0)) + 8, top + 14, letter, color=color, bold=True)
    bottom = 48 + 22 * len(rows)
    picture.text(x(shares.killed) + 16, 76, "no owner until the\nleases of A end", color=GREY)
    for moment, text in ((shares.joined, "D joins"), (shares.killed, "A is killed")):
        picture.line((x(moment), 36), (x(moment), bottom), color=INK, broken=True)
        picture.text(x(moment), 30, text, at="middle", bold=True)
    picture.axis([(x(each), f"{each} s") for each in range(0, int(shares.end) + 1, 5)], bottom + 6)
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    "lease": lease,
    "out-before-in": out_before_in,
    "fence": fence,
    "candidate": candidate,
    "message": message,
    "partitions": partitions,
}
