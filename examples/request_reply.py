"""Send a request and await its reply; tenure manages the reply queue and the correlation id."""

import asyncio

import tenure


async def price(message: tenure.Message) -> tenure.Reply:
    return tenure.Reply(json={"item": message.json()["item"], "price": 12.5})  # answers and completes, in one step


async def main() -> None:
    async with tenure.connect("sqlite:///work.db") as backend:
        prices = backend.queue("prices")
        stop = asyncio.Event()
        serving = asyncio.create_task(prices.consume(price, stop=stop))  # usually in another process
        answer = await prices.request(json={"item": "kettle"}, timeout=30)
        print(f"{answer.json()['item']}: {answer.json()['price']}")
        stop.set()
        await serving


asyncio.run(main())
