"""Work at certain times, each time once in the whole fleet: start it in several shells."""

import asyncio
from contextlib import suppress
from datetime import datetime

import tenure

service = tenure.Service("sqlite:///work.db")
beats: list[datetime] = []


@service.every("0 3 * * *", timezone="Europe/Berlin")
async def tidy() -> None:
    print("tidy up")


@service.every(0.5, missed="skip", missed_after=1.0)  # seconds
async def beat(slot: datetime, message: tenure.Message) -> None:
    print(f"beat {len(beats) + 1}, delivery {message.delivery_count}")
    beats.append(slot)
    if len(beats) == 3:
        service.stop()


async def main() -> None:
    await service.serve()
    assert all(slot.timestamp() % 0.5 == 0 for slot in beats)

    async with tenure.connect("sqlite:///work.db") as backend:
        report = backend.schedule(
            "report",
            "30 6 * * MON-FRI",
            queue="reports",  # consumed by any program
            timezone="America/New_York",
            missed="all",
            message=tenure.Outgoing(b"the orders of yesterday", priority=9),
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await report.run()  # in every instance, for as long as it runs

        paused = await backend.queue("tidy").schedules.pause("tidy")  # in all instances, at once
        print(f"{paused.name}, {paused.every}: {'paused' if paused.paused else paused.next}")


if __name__ == "__main__":
    asyncio.run(main())
