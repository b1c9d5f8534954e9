"""After: the same with tenure, on the same key, so that both exclude each other. Needs: pip install 'tenure[redis]'"""

import os
import time

import tenure

URL = os.environ.get("TENURE_URL", "redis://127.0.0.1:6379/0?lease_prefix=")  # the key is the name, as before


def report(term: tenure.sync.Term) -> None:
    for page in range(1, 4):
        term.check()  # the lease is renewed meanwhile; a thread can't be cancelled, so it has to ask
        print(f"after: page {page}", flush=True)
        time.sleep(0.2)


with tenure.sync.connect(URL) as backend:
    backend.election("nightly-report", ttl=15).run(report)
