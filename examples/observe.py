"""Observe every change of leader, without being a candidate."""

import asyncio

import tenure


async def watch(election: tenure.Election, seen: dict[str, asyncio.Event]) -> None:
    async for leader in election.observe():
        if leader is not None:
            print(f"{leader.metadata['name']} leads, term {leader.token}")
            seen[leader.metadata["name"]].set()
        else:
            print("no leader")
            if all(event.is_set() for event in seen.values()):
                return


async def main() -> None:
    seen = {name: asyncio.Event() for name in ("anna", "ben")}
    async with tenure.connect("sqlite:///work.db") as backend:
        watching = asyncio.create_task(watch(backend.election("shift", ttl=15), seen))
        for name, event in seen.items():
            async with backend.election("shift", ttl=15, metadata={"name": name}).campaign():
                await event.wait()  # changes in quick succession may be reported as one
        await watching


asyncio.run(main())
