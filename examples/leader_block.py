"""The same as a block: entered when elected; the lease is released at its end."""

import asyncio

import tenure


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        election = backend.election("nightly-report", ttl=15)
        try:
            async with election.campaign() as term:
                print(f"elected: term {term.token}, trusted for {term.remaining():.0f} s unless renewed")
                await asyncio.sleep(0.2)  # the work; it is cancelled when the term is lost
        except tenure.TermLost as lost:
            print(f"another candidate may lead now: {lost}")
        print(f"done; now the leader is {await election.leader()}")


asyncio.run(main())
