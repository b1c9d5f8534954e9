"""The plain run: the same computation in one process, without election and queue, to compare with.

It uses the same chunks, and omits every chunk that can't be counted, which would be dead-lettered.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from tenure._demo import parent_watch
from tenure._demo.computation import TooDeep, count_chunk
from tenure._demo.ledger import Ledger


def main() -> int:
    """Count the files of the job in the ledger that standard input names; write the result as JSON."""
    ledger = Ledger(Path(json.loads(parent_watch.read_first_line())))
    parent_watch.watch_parent()
    job = ledger.job()
    ledger.close()
    counts, left_out = [], []
    began = time.monotonic()
    for chunk in job.chunks:
        try:
            counts += [dataclasses.asdict(count) for count in count_chunk(job.folder, chunk)]
        except TooDeep:
            left_out.append(chunk.number)
    json.dump({"seconds": time.monotonic() - began, "counts": counts, "left_out": left_out}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
