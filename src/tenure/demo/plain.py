"""The plain run: the same computation in one process, without any election, to compare with."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from tenure.demo import leash
from tenure.demo.computation import count_file
from tenure.demo.ledger import Ledger


def main() -> int:
    """Count the files of the job in the ledger that is named on standard input; write seconds and counts as JSON."""
    ledger = Ledger(Path(json.loads(leash.orders())))
    leash.wear()
    job = ledger.job()
    ledger.close()
    began = time.monotonic()
    counts = [dataclasses.asdict(count_file(job.folder, file.path, parsed=file.parsed)) for file in job.files]
    json.dump({"seconds": time.monotonic() - began, "counts": counts}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
