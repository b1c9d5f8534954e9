"""After: the same with tenure alone. Needs: pip install 'tenure[postgres]', and tenure migrate, once"""

import asyncio
import os

import tenure


async def report(term: tenure.Term) -> None:
    for page in range(1, 4):
        term.check()
        print(f"after: page {page}", flush=True)
        await asyncio.sleep(0.2)


async def main() -> None:
    async with tenure.connect(os.environ["DATABASE_URL"]) as backend:
        await backend.election("nightly-report", ttl=15).run(report)


asyncio.run(main())
