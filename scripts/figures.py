"""Draw the pictures of docs/concepts.md, and write its table of outcomes. ``--check`` only compares.

The pictures show runs of the code and its tables, see ``concept_pictures.py`` and ``figure_runs.py``. The numbers in
the sentences of the page are compared with the same runs.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.concept_pictures import PICTURES, A, B, cut_off, moment_of, paused, require_same, seconds  # noqa: E402
from scripts.figure_runs import lease_times, shares_over_time  # noqa: E402
from tenure._queue.outcomes import RULES, Disposition, Ending, Reason  # noqa: E402
from tenure._timing import Timing  # noqa: E402

PAGE = ROOT / "docs" / "concepts.md"
IMAGES = ROOT / "docs" / "images"


def main() -> int:
    files = all_files()
    complaints = [f"{PAGE.name} lacks {text!r}, as the code has it" for text in missing(files[PAGE])]
    if sys.argv[1:] == ["--check"]:
        complaints += [
            f"{file.relative_to(ROOT)} differs from the code; run: python scripts/figures.py"
            for file, text in files.items()
            if not file.exists() or file.read_text(encoding="utf-8") != text
        ]
    else:
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    print("".join(f"{one}\n" for one in complaints), end="", file=sys.stderr)
    return 1 if complaints else 0


def all_files() -> dict[Path, str]:
    """Return the text of each file that is written."""
    files = {IMAGES / f"concept-{name}.svg": draw().svg() for name, draw in PICTURES.items()}
    files[PAGE] = with_table(PAGE.read_text(encoding="utf-8"), table_of_outcomes())
    return files


def with_table(page: str, table: str) -> str:
    """Return *page* with *table* in place of the one that has the same first line."""
    head = re.escape(table.split("\n", 1)[0])
    found, count = re.subn(rf"^{head}\n(\|.*\n)*", lambda _: table, page, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} tables that begin with the line {table.splitlines()[0]!r}")
    return found


def missing(page: str) -> list[str]:
    """Return what the sentences of *page* should say of the pictures, and don't."""
    words = " ".join(page.split())
    return [text for text in quoted() if text not in words]


def quoted() -> list[str]:
    """Return pieces of sentences, with the numbers of the pictures."""
    times, timing = lease_times(), Timing()
    run, pause, shares = cut_off(), paused(), shares_over_time()
    trusted, next_term = moment_of(run, A, "trusted until"), moment_of(run, B, "began", 34)
    moved = sum(shares.killed > spans[-1][0] > shares.joined for spans in shares.spans.values())
    claimed = [spans[-1][0] for spans in shares.spans.values() if spans[-1][0] > shares.killed]
    (answer,) = [one.what for one in pause if one.what.startswith("refused: ")]
    *earlier, last = (f"{one:g}" for one in times.renewals)
    return [
        f"asked at {seconds(times.asked)}, granted at {seconds(times.granted)}, attempts to renew at "
        f"{', '.join(earlier)} and {last} s, work cancelled at {seconds(times.cancelled)}, trusted until "
        f"{seconds(times.trusted_until)}, ended at the store at {seconds(times.ends)}",
        f"renew its lease at {', '.join(map(seconds, times.renewals))}.",
        f"cancelled at {seconds(times.cancelled)}. From then on it has `grace`, {seconds(timing.grace)},",
        f"trusts its lease until {seconds(times.trusted_until)}: the `ttl` of {seconds(timing.ttl)}, less "
        f"{timing.drift * 100:g} % of it (`drift`, {seconds(timing.drift * timing.ttl)}) and `margin`, "
        f"{seconds(timing.margin)}.",
        f"ends at the store at {seconds(times.ends_earliest)} at the earliest",
        f"executed the request at {seconds(times.executed)}, so it ends at {seconds(times.ends)}.",
        f"cut off from the store at {seconds(moment_of(run, A, 'cut off'))},",
        f"cancels its work at {seconds(moment_of(run, A, 'cancelled'))}, and trusts its term until {seconds(trusted)}.",
        f"The lease of A ends at the store at {seconds(moment_of(run, 'store', 'lease ends'))}.",
        f"leads from {seconds(next_term)}. For {seconds(next_term - trusted)} no candidate trusts a term.",
        f"checks its term at {seconds(moment_of(pause, A, 'paused'))},",
        f"B leads in term 34 from {seconds(moment_of(pause, B, 'began', 34))},",
        f"At {seconds(moment_of(pause, A, 'goes on'))} A goes on",
        answer.removeprefix("refused: ").partition(";")[0],
        f"D joins at {seconds(shares.joined)}: {moved} of {len(shares.partitions)} partitions move to it, one of each "
        f"member, and the other {len(shares.partitions) - moved} stay.",
        f"A is killed at {seconds(shares.killed)}.",
        f"no owner for up to {seconds(max(claimed) - shares.killed)}.",
    ]


# --- the table ------------------------------------------------------------------------------------------------------

BECOMES = {
    Disposition.SUCCESS: "completed",
    Disposition.FAILURE: "retried",
    Disposition.GIVE_BACK: "given back",
    Disposition.LET_EXPIRE: "left",
}

CANCELLED_FOR = {
    Reason.NONE: "not cancelled",
    Reason.UNANSWERED: "renewals got no answer",
    Reason.MAX_HOLD: "it ran for longer than `max_hold`",
    Reason.CLOSING: "its consumer is closed",
    Reason.DRAIN: "the time of a drain is over",
    Reason.LEAVE: "the time to stop is over",
    Reason.STALLED: "its process did not run in time to renew the lock",
    Reason.LEFT_BEHIND: "it was cancelled twice, and its thread runs on",
    Reason.DENIED: "the store said that the lock is over",
    Reason.TOO_LATE: "the lock has ended meanwhile",
}


def table_of_outcomes() -> str:
    """Return a row for each group of reasons with equal rules, and a column for each ending of a handler."""
    require_same("dispositions", set(Disposition), BECOMES.keys())
    require_same("reasons", set(Reason), CANCELLED_FOR.keys())
    grouped: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for reason, words in CANCELLED_FOR.items():
        grouped[tuple(BECOMES[RULES[reason, ending].disposition] for ending in Ending)].append(words)
    rows = [["Why it was cancelled", *(ending.value for ending in Ending)], ["---"] * (len(Ending) + 1)]
    rows += [["; ".join(words), *cells] for cells, words in grouped.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
