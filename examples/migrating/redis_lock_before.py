"""Before: one process at a time writes the report, by a lock of redis-py. Needs: pip install redis"""

import os
import time

import redis

client = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"))


def report() -> None:
    for page in range(1, 4):
        print(f"before: page {page}", flush=True)
        time.sleep(0.2)  # longer than the timeout, and another process begins: nothing renews the lock


with client.lock("nightly-report", timeout=60):  # without timeout=, a killed process holds it for ever
    report()
