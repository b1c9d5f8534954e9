"""Lead on a Lease, in one election with users of client-go. Needs: pip install 'tenure[kubernetes]'"""

import asyncio
import os

import tenure

URL = os.environ.get("TENURE_URL", "kubernetes://")  # in a pod: its own namespace


async def coordinate(term: tenure.Term) -> None:
    # Another candidate: a LeaseLock of client-go with the name nightly-report
    print(f"leading nightly-report in term {term.token}")
    await asyncio.sleep(0.5)


async def main() -> None:
    async with tenure.connect(URL) as backend:
        await backend.election("nightly-report", ttl=15).run(coordinate)
        print(f"led by {await backend.election('nightly-report').leader()}")


asyncio.run(main())
