"""Work only while leading. Start it in two shells: one waits, and takes over if the other is killed."""

import asyncio

import tenure


async def coordinate(term: tenure.Term) -> None:
    for page in range(1, 4):
        term.check()  # raises TermLost when this process can no longer be sure that it leads
        print(f"page {page} of the report, written in term {term.token}")
        await asyncio.sleep(0.2)


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        await backend.election("nightly-report", ttl=15).run(coordinate)


asyncio.run(main())
