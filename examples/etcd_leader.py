"""Lead on etcd, in one election with etcdctl and programs in Go. Needs: pip install 'tenure[etcd]'"""

import asyncio
import os

import tenure

URL = os.environ.get("TENURE_URL", "etcd://127.0.0.1:2379/?prefix=jobs/")


async def coordinate(term: tenure.Term) -> None:
    # Another candidate: etcdctl elect jobs/nightly-report me
    print(f"leading nightly-report in term {term.token}, a revision of etcd")
    await asyncio.sleep(0.5)


async def main() -> None:
    async with tenure.connect(URL) as backend:
        await backend.election("nightly-report", ttl=15).run(coordinate)
        print(f"led by {await backend.election('nightly-report').leader()}")


asyncio.run(main())
