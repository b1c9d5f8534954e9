"""``python -m benchmarks NAME …``, with one of the names below; each has a ``--help``."""

from __future__ import annotations

import runpy
import sys

KNOWN = (
    "queue",
    "consuming",
    "election",
    "coordinators",
    "partitions",
    "idle",
    "peers",
    "redis_queue",
    "postgres_queue",
    "nats_queue",
    "servicebus",
    "rabbit_queue",
    "service",
    "telemetry",
)

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in KNOWN:
        sys.exit(f"usage: python -m benchmarks {{{','.join(KNOWN)}}} [--help]")
    name = sys.argv.pop(1)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
