"""After: the same with tenure, in the same election of ZooKeeper. Needs: pip install 'tenure[zookeeper]'"""

import os
import time

import tenure

# dialect=kazoo: it stands in kazoo's queue. tick: the servers' tickTime, in seconds
URL = os.environ.get("TENURE_URL", "zookeeper://127.0.0.1:2181/jobs?dialect=kazoo&tick=2")


def report(term: tenure.sync.Term) -> None:
    for page in range(1, 4):
        term.check()  # raises TermLost when the session may have ended
        print(f"after: page {page}", flush=True)
        time.sleep(0.2)


with tenure.sync.connect(URL) as backend:
    backend.election("nightly-report", ttl=15).run(report)
