"""Lead on ZooKeeper, in one election with Curator's LeaderLatch. Needs: pip install 'tenure[zookeeper]'"""

import asyncio
import os

import tenure

URL = os.environ.get("TENURE_URL", "zookeeper://127.0.0.1:2181/jobs")


async def coordinate(term: tenure.Term) -> None:
    # Another candidate: new LeaderLatch(client, "/jobs/nightly-report", "me").start()
    print(f"leading nightly-report in term {term.token}, a zxid of ZooKeeper")
    await asyncio.sleep(0.5)


async def main() -> None:
    async with tenure.connect(URL) as backend:
        await backend.election("nightly-report", ttl=15).run(coordinate)
        print(f"led by {await backend.election('nightly-report').leader()}")


asyncio.run(main())
