"""Lead only while the work makes progress, publish the leader's address, and step down when asked."""

import asyncio

import tenure


def disk_is_there() -> bool:
    return True  # check what the work depends on


async def coordinate(term: tenure.Term) -> None:
    while True:
        term.check()
        print(f"page written in term {term.token}")
        term.beat()  # without a beat for stall_after seconds, the lease is not renewed
        await asyncio.sleep(0.1)


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        election = backend.election(
            "nightly-report",
            ttl=15,  # seconds until a dead leader's name is free
            metadata={"address": "10.0.0.1:8080"},  # shown to other processes while this one leads
            stall_after=10,
            health=disk_is_there,
        )
        stop = asyncio.Event()
        leading = asyncio.create_task(election.run(coordinate, stop=stop))
        async for leader in election.observe():  # at first, and then at every change
            if leader is not None and "address" in leader.metadata:
                print(f"{leader.metadata['address']} leads")
                break
        stop.set()  # don't campaign again
        await election.resign()  # cancels the work; election.ask_to_resign() asks the present leader
        await leading
        print(f"now the leader is {await election.leader()}")


asyncio.run(main())
