"""See every change of leader, from outside."""

import asyncio

import tenure


async def watch(election: tenure.Election) -> None:
    last = ""
    async for leader in election.observe():
        print(f"{leader.metadata['name']} leads, term {leader.token}" if leader else "nobody leads")
        if leader is None and last == "ben":
            return
        last = leader.metadata["name"] if leader else ""


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        watching = asyncio.create_task(watch(backend.election("shift", ttl=15)))
        for name in ("anna", "ben"):
            async with backend.election("shift", ttl=15, metadata={"name": name}).campaign():
                await asyncio.sleep(0.3)
        await watching


asyncio.run(main())
