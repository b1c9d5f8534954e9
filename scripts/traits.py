"""Write docs/backends.md: what each backend can do, from the traits that it declares. ``--check`` only compares."""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from tenure._registry import BACKENDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "backends.md"

HEAD = """\
# Traits of the backends

Written by `python scripts/traits.py` from the traits that each backend declares, and checked by the tests. The
conformance suites choose their tests by the same traits; `tenure doctor URL` shows those of the store at hand.

*native*: the store does it itself. *emulated*: tenure does it in the store, in the same atomic step; schedules in three
steps instead, so that a process that dies in between leaves a slot that is sent again, under the same ids.
*impossible*: it is refused with an error. Times are in seconds, sizes in bytes. A server's settings may allow less, as
the page of its store says: etcd with its defaults grants leases from 2 s, ZooKeeper from 4 to 40 s.
"""


def main() -> int:
    page = page_of_traits()
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == page:
            return 0
        print("docs/backends.md differs from the traits; run: python scripts/traits.py", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def page_of_traits() -> str:
    schemes_of: dict[str, list[str]] = {}
    for scheme, (module, _) in BACKENDS.items():
        schemes_of.setdefault(module, []).append(f"`{scheme}:`")
    modules = {", ".join(schemes): importlib.import_module(module) for module, schemes in schemes_of.items()}
    leases = {name: module.TRAITS for name, module in modules.items() if hasattr(module, "TRAITS")}
    queues = {name: module.QUEUE_TRAITS for name, module in modules.items() if hasattr(module, "QUEUE_TRAITS")}
    return f"{HEAD}\n## Elections\n\n{table(leases)}\n## Queues\n\n{table(queues)}"


def table(traits: dict[str, Any]) -> str:
    """Return a row for each trait and a column for each backend."""
    names = [field.name for field in dataclasses.fields(next(iter(traits.values())))]
    rows = [["", *traits], ["---"] * (len(traits) + 1)]
    rows += [[name.replace("_", " "), *(cell(getattr(each, name)) for each in traits.values())] for name in names]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def cell(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return f"{value:,g}" if value < 10**6 else f"{value / 2**20:,.0f} MiB"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
