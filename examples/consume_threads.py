"""Without asyncio: the same queue, for plain functions and threads; and one message that can't be handled."""

import tenure


def handle(message: tenure.sync.Message) -> None:
    if message.body == b"order 2":
        raise tenure.Reject("no such customer", "order 2 names an unknown customer")
    print(f"{message.body.decode()} is served")


with tenure.sync.connect("sqlite:///work.db") as backend:
    orders = backend.queue("orders", lock=30)
    for number in range(1, 4):
        orders.send(f"order {number}".encode(), id=f"order-{number}")  # with an id, a repeated send is dropped
    orders.consume(handle, concurrency=1, until_empty=True)
    for letter in orders.dead_letters.peek():
        print(f"{letter.id} is dead: {letter.reason}; {letter.description}")
