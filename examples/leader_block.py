"""The same as a block: entered once elected, left with the lease handed back."""

import asyncio

import tenure


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        election = backend.election("nightly-report", ttl=15)
        try:
            async with election.campaign() as term:
                print(
                    f"elected: term {term.token}, to be trusted for {term.remaining():.0f} s if nothing more is heard"
                )
                await asyncio.sleep(0.2)  # the work; it is cancelled when the term is lost
        except tenure.TermLost as lost:
            print(f"somebody else may lead now: {lost}")
        print(f"done; now the leader is {await election.leader()}")


asyncio.run(main())
