"""Before: the leader of an election of kazoo writes the report. Needs: pip install kazoo"""

import os
import time

from kazoo.client import KazooClient

client = KazooClient(os.environ.get("ZOOKEEPER", "127.0.0.1:2181"))
client.start()


def report() -> None:
    for page in range(1, 4):
        print(f"before: page {page}", flush=True)
        time.sleep(0.2)  # goes on if the session ends: kazoo does not interrupt it


client.Election("/jobs/nightly-report", "before").run(report)
client.stop()
