"""More of a service: a lifespan, hooks, replies, handlers and leaders that are plain functions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import tenure
import tenure.sync


@dataclass
class Question:
    item: str


@dataclass
class Price:
    amount: float


prices: dict[str, float] = {}
posted: list[str] = []


@asynccontextmanager
async def lifespan(service: tenure.Service) -> AsyncIterator[None]:
    prices.update(kettle=12.5, cup=3.0)  # a connection pool, say
    yield
    prices.clear()


service = tenure.Service("sqlite:///work.db", lifespan=lifespan)
questions = service.queue("questions", Question, lock=60)
letters = service.queue("letters", str)


@service.handler(questions, concurrency=4)
async def answer(question: Question, message: tenure.Message) -> Price | tenure.Reject:
    if question.item not in prices:
        return tenure.Reject("unknown item", question.item)  # a dead letter at once
    await letters.send(f"{message.id} asks for {question.item}", id=f"letter-{message.id}")
    return Price(prices[question.item])  # the reply, if one is asked for


@service.handler(letters)
def post(letter: str) -> None:  # a plain function runs in a thread
    posted.append(letter)


@service.leader("clerk", ttl=15, again=True)
def count(term: tenure.sync.Term) -> None:  # so does this one
    while not term.lost.wait(60):
        print(f"{questions.blocking.queue.stats().dead} dead letters")


@service.on_startup
async def ask() -> None:
    await questions.send_batch([questions.outgoing(Question(item), id=f"of-{item}") for item in ("kettle", "spoon")])


@service.on_shutdown
async def show() -> None:
    print(f"{len(posted)} letters posted")
    for letter in await questions.queue.dead_letters.peek():
        print(f"dead: {letter.reason}, {letter.description}")


async def main() -> None:
    async with service.running():  # beside other code
        price = await questions.request(Question("cup"), Price, timeout=30)
        print(f"a cup costs {price.amount}")
    await service.serve(until_empty=True)  # in a running loop; service.run() starts a loop of its own


if __name__ == "__main__":
    asyncio.run(main())
