"""
Check with pyright that every type in the public API is known.

pyright counts every module whose name has no underscore as public, and knows a name by the module that defines it. Here
the exports of ``tenure`` and the plain values are public; elsewhere, only a type that is unknown (and not just
unannotated) is a fault.
"""

import json
import subprocess
import sys
from typing import Any

import tenure

PLAIN = ("tenure.errors", "tenure.events", "tenure._url")


def main() -> int:
    asked = ["pyright", "--pythonpath", sys.executable, "--verifytypes", "tenure", "--ignoreexternal", "--outputjson"]
    found = json.loads(subprocess.run(asked, capture_output=True, text=True, check=False).stdout)
    symbols: list[dict[str, Any]] = found["typeCompleteness"]["symbols"]
    if not symbols:
        print("pyright found no public symbol at all: is tenure installed with its py.typed?", file=sys.stderr)
        return 1
    faults = [symbol for symbol in symbols if is_fault(symbol)]
    for symbol in faults:
        print(symbol["name"])
        for one in symbol["diagnostics"]:
            print(f"    {one['file']}:{one['range']['start']['line'] + 1}: {one['message']}")
    print(f"{len(symbols)} symbols, {len(faults)} of unknown type")
    return 1 if faults else 0


def is_fault(symbol: dict[str, Any]) -> bool:
    if symbol["isTypeKnown"] or not symbol["isExported"]:
        return False
    return not symbol["isTypeAmbiguous"] or symbol["name"].startswith(public())


def public() -> tuple[str, ...]:
    return (*PLAIN, *(f"{home}.{name}" for home, names in tenure._HOMES.items() for name in names))


if __name__ == "__main__":
    sys.exit(main())
