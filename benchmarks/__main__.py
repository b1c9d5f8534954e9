"""``python -m benchmarks NAME …``, with one of the names below; each has a ``--help``.

Without a name, it measures what docs/performance.md shows, and writes that page's tables and graphs anew.
"""

from __future__ import annotations

import runpy
import sys

KNOWN = (
    "performance",
    "queue",
    "capacity",
    "consuming",
    "election",
    "coordinators",
    "hang",
    "partitions",
    "idle",
    "names",
    "peers",
    "redis_queue",
    "postgres_queue",
    "nats_queue",
    "servicebus",
    "rabbit_queue",
    "short_use",
    "instructions",
    "service",
    "telemetry",
)

if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.argv += ["performance", "--write"]
    if sys.argv[1] not in KNOWN:
        sys.exit(f"usage: python -m benchmarks {{{','.join(KNOWN)}}} [--help]")
    name = sys.argv.pop(1)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
