"""Handlers of a service: typed bodies, the ways in which they are called, replies, and what is refused."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import pytest

import tenure
import tenure.sync
from tenure import ConfigError, Reject, Reply, Retry, Service, Stats, TypedQueue
from tenure.testing import connect_here
from tenure.testing.loop import run
from tests.durations import PATIENCE


@dataclass
class Order:
    item: str
    count: int = 1


@dataclass
class Refund:
    order: str


class Line(TypedDict):
    article: str


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Everything:
    pair: tuple[int, str]
    id: UUID
    state: Literal["new", "paid"]
    orders: list[Order]


EVERYTHING = Everything((7, "a"), UUID(int=7), "paid", [Order("kettle"), Order("cup", 2)])

KETTLE = Order("kettle")


def service_of(kind: Any, store: Any = "memory:", **options: Any) -> tuple[Service, TypedQueue[Any]]:
    service = Service(store, **options)
    return service, service.queue("orders", kind)


async def consumed(service: Service, queue: TypedQueue[Any], *bodies: Any) -> Stats:
    """Send *bodies*, run *service* until all is done, and return what is left."""
    async with service:
        await queue.send_batch(bodies)
        await asyncio.wait_for(service.serve(until_empty=True), PATIENCE)
        return await queue.queue.stats()


# --- bodies ---


@pytest.mark.parametrize(
    ("kind", "body", "as_sent"),
    [
        (bytes, b"\xff\x00", b"\xff\x00"),
        (str, "tea for zwölf", "tea for zwölf".encode()),
        (str, "", b""),
        (int, 7, b"7"),
        (dict, {"item": "tea"}, b'{"item":"tea"}'),
        (object, [1, None], b"[1,null]"),
        (Order, Order("tea", 2), b'{"item":"tea","count":2}'),
        (Line, {"article": "tea"}, b'{"article":"tea"}'),
        (Point, Point(1, 2), b"[1,2]"),
        (list[Order], [Order("tea")], b'[{"item":"tea","count":1}]'),
        (Order | Refund, Refund("17"), b'{"order":"17"}'),
        (UUID, UUID(int=7), b'"00000000-0000-0000-0000-000000000007"'),
        (Everything, EVERYTHING, None),
    ],
    ids=["bytes", "str", "empty", "int", "dict", "any", "dataclass", "typeddict", "named tuple", "list", "union",
         "uuid", "everything"],
)  # fmt: skip
async def test_a_body_arrives_as_what_was_sent(kind: Any, body: Any, as_sent: bytes | None) -> None:
    service, queue = service_of(kind)
    got: list[Any] = []

    @service.handler(queue)
    async def serve(given: Any, message: tenure.Message) -> None:
        got.append(given)
        assert as_sent in (None, message.body)
        assert queue.decode(message) == given

    assert await consumed(service, queue, body) == Stats()
    assert got == [body]
    assert type(got[0]) is type(body)


async def test_bodies_of_pydantic_and_msgspec() -> None:
    pydantic = pytest.importorskip("pydantic")
    msgspec = pytest.importorskip("msgspec")
    model = pydantic.create_model("model", item=(str, ...), count=(int, 1))
    struct = msgspec.defstruct("struct", [("item", str), ("count", int, 1)])
    for kind in (model, struct):
        service, queue = service_of(kind)
        got: list[Any] = []

        @service.handler(queue)
        async def serve(body: Any, into: list[Any] = got) -> None:
            into.append(body)

        assert await consumed(service, queue, kind(item="tea", count=2)) == Stats()
        assert got == [kind(item="tea", count=2)]


async def test_a_body_says_of_which_type_it_is() -> None:
    service = Service("memory:")
    async with service:
        queue = service.backend.queue("orders")
        await service.queue("orders", str).send("tea", headers={"from": "shop"})
        (text,) = await queue.receive()
        assert text.headers == {"content-type": "text/plain; charset=utf-8", "from": "shop"}
    other = Service("memory:")
    async with other:
        orders = other.queue("orders", Order)
        await orders.send(KETTLE, id="a", priority=3)
        (json,) = await orders.queue.receive()
        assert (json.headers, json.id, json.priority) == ({"content-type": "application/json"}, "a", 3)


async def test_a_body_that_does_not_fit_is_dead_at_once() -> None:
    service = Service("memory:")
    served: list[Order] = []

    @service.handler("orders")
    async def serve(order: Order) -> None:
        served.append(order)

    async with service:
        orders = service.backend.queue("orders")
        for body in (b"{", b"[]", b'{"item":7}', b'{"item":"tea"}'):
            await orders.send(body)
        await service.serve(until_empty=True)
        letters = await orders.dead_letters.peek()
        assert [(one.reason, one.delivery_count) for one in letters] == [("undecodable", 1)] * 3
        assert letters[2].description == "the body.item must be str, not 7"
    assert served == [Order("tea")]


async def test_text_that_is_none_is_dead_at_once() -> None:
    service, queue = service_of(str)

    @service.handler(queue)
    async def serve(text: str) -> None:
        raise AssertionError("it can't be called")

    async with service:
        await queue.queue.send(b"\xff")
        await service.serve(until_empty=True)
        assert [one.reason for one in await queue.queue.dead_letters.peek()] == ["undecodable"]


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (bytes, "text", "the body must be bytes, not str: 'text'"),
        (str, b"text", "the body must be str, not bytes"),
        (str, "\ud800", "no text that UTF-8 has a form of"),
        (Order, {"item": "tea"}, "the body must be Order, not dict"),
        (Order, Order, "the body must be Order, not type"),
        (object, object(), "object has no JSON form"),
        (float, float("nan"), "can't be written as JSON"),
    ],
)
async def test_a_body_that_is_no_such_thing_is_not_sent(kind: Any, body: Any, says: str) -> None:
    service, queue = service_of(kind)
    async with service:
        with pytest.raises(ConfigError, match=says):
            await queue.send(body)
        with pytest.raises(ConfigError, match=says):
            queue.outgoing(body)
        assert await queue.queue.stats() == Stats()


async def test_a_batch_takes_bodies_and_messages() -> None:
    service, queue = service_of(Order)
    async with service:
        ids = await queue.send_batch([Order("a"), queue.outgoing(Order("b"), id="b", delay=60)])
        assert ids[1] == "b"
        stats = await queue.queue.stats()
        assert (stats.ready, stats.delayed) == (1, 1)


# --- the ways in which a handler is called ---


async def body_only(order: Order) -> str:
    return order.item


async def message_only(message: tenure.Message) -> str:
    return str(message.json()["item"])


async def body_and_message(order: Order, message: tenure.Message) -> str:
    assert message.decode(Order) == order
    return order.item


async def message_and_body(message: tenure.Received, order: Order) -> str:
    return await body_and_message(order, message)  # type: ignore[arg-type]


async def with_default(order: Order, shout: bool = False) -> str:
    return order.item.upper() if shout else order.item


def in_thread(order: Order, message: tenure.sync.Message) -> str:
    assert message.decode(Order) == order
    return order.item


def around(order: Order) -> Any:
    return body_only(order)


def in_process(order: Order, message: tenure.Received) -> str:
    assert message.decode(Order) == order
    return order.item


class Serve:
    async def __call__(self, order: Order) -> str:
        return order.item

    def method(self, order: Order) -> str:
        return order.item


HANDLERS: dict[str, tuple[Callable[..., Any], Any]] = {
    "body": (body_only, "auto"),
    "message": (message_only, "auto"),
    "both": (body_and_message, "auto"),
    "reversed": (message_and_body, "auto"),
    "default": (with_default, "auto"),
    "partial": (functools.partial(with_default, shout=False), "auto"),
    "object": (Serve(), "auto"),
    "thread": (in_thread, "auto"),
    "method": (Serve().method, "auto"),
    "around an async one": (around, "auto"),
    "process": (in_process, "process"),
}


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "by name"])
@pytest.mark.parametrize(
    "how", [pytest.param(one, marks=pytest.mark.process) if one == "process" else one for one in HANDLERS]
)
async def test_a_handler_is_called_as_it_is_written_and_its_result_is_the_reply(how: str, typed: bool) -> None:
    handler, run_in = HANDLERS[how]
    service = Service("memory:")
    queue = service.queue("orders", Order) if typed else None
    assert service.handler("orders" if queue is None else queue, run_in=run_in)(handler) is handler
    async with service.running():
        orders = service.queue("orders", Order)
        assert await orders.request(KETTLE, str, timeout=PATIENCE) == "kettle"
        stats = await orders.queue.stats()
        assert (stats.locked, stats.dead) == (0, 0)


async def test_a_handler_without_annotations_takes_the_type_of_its_queue() -> None:
    service, queue = service_of(Order)
    got: list[Any] = []

    @service.handler(queue)
    async def serve(order, message):  # type: ignore[no-untyped-def]
        got.append((order, message.delivery_count))

    assert await consumed(service, queue, KETTLE) == Stats()
    assert got == [(KETTLE, 1)]


async def test_a_handler_of_a_local_type_takes_the_type_of_its_queue() -> None:
    @dataclass
    class Local:
        item: str

    service = Service("memory:")
    queue = service.queue("orders", Local)
    got: list[Local] = []

    @service.handler(queue)
    async def serve(order: Local, message: tenure.Message) -> None:
        got.append(order)

    assert await consumed(service, queue, Local("tea")) == Stats()
    assert got == [Local("tea")]


class WithAnnotations:
    shop: int = 1

    async def __call__(self, message: tenure.Message) -> None:
        assert isinstance(message, tenure.Message)
        SEEN.append(message.delivery_count)


SEEN: list[int] = []


async def message_of_unknown_result(message: tenure.Message) -> Missing | None:  # type: ignore[name-defined]  # noqa: F821
    assert isinstance(message, tenure.Message)
    SEEN.append(message.delivery_count)
    return None


async def message_first(message: tenure.Message, order: Order) -> Missing | None:  # type: ignore[name-defined]  # noqa: F821
    assert (type(message), type(order)) == (tenure.Message, Order)
    SEEN.append(message.delivery_count)
    return None


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "by name"])
@pytest.mark.parametrize(
    "handler", [WithAnnotations(), message_of_unknown_result, message_first], ids=["object", "result", "both"]
)
async def test_each_annotation_counts_by_itself(handler: Any, typed: bool) -> None:
    SEEN.clear()
    service = Service("memory:")
    orders = service.queue("orders", Order)
    service.handler(orders if typed else "orders")(handler)
    assert await consumed(service, orders, KETTLE) == Stats()
    assert SEEN == [1]


class Liar:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return bytes


class OwnReply(Reply):
    def __init__(self) -> None:
        pass  # without what a Reply needs


@pytest.mark.parametrize("result", [Liar(), OwnReply()], ids=["liar", "own reply"])
def test_a_result_that_misbehaves_affects_only_its_delivery(result: Any) -> None:
    async def main() -> None:
        backend = connect_here()
        service, orders = service_of(bytes, backend)
        errors: list[str] = []

        async def serve(body: bytes) -> bytes:
            return b"fine" if body == b"fine" else result

        def note(_: object, error: BaseException) -> None:
            errors.append(type(error).__name__)

        service.handler(orders, retry=tenure.RetryPolicy(never=(Exception,)), on_error=note)(serve)
        async with backend, service.running():
            with pytest.raises(tenure.TimedOut):
                await orders.request(b"broken", bytes, timeout=PATIENCE)
            assert await orders.request(b"fine", bytes, timeout=PATIENCE) == b"fine"
            assert (await orders.queue.stats()).dead == 1
        assert len(errors) == 1

    run(main())


async def test_a_handler_may_take_more_than_the_queue_has() -> None:
    service, queue = service_of(Order)
    got: list[object] = []

    @service.handler(queue)
    async def serve(order: object) -> None:
        got.append(order)

    assert await consumed(service, queue, KETTLE) == Stats()
    assert got == [KETTLE]


# --- replies ---


def returning(result: Any, annotation: Any) -> Callable[..., Any]:
    async def serve(message: tenure.Message) -> Any:
        return result

    serve.__annotations__ = {"message": tenure.Message, "return": annotation}
    if annotation is ...:
        del serve.__annotations__["return"]
    return serve


@pytest.mark.parametrize(
    ("result", "annotation", "asked", "reply"),
    [
        (KETTLE, Order, Order, KETTLE),
        (KETTLE, Order | None, Order | None, KETTLE),
        (None, Order | None, Order | None, None),
        ("tea", str, str, "tea"),
        ("tea", str | Retry, str, "tea"),
        ("tea", str | None, str | None, "tea"),
        ("tea", str | None, str, "tea"),
        (None, str | None, str | None, None),
        (b"\xff", bytes | None, bytes, b"\xff"),
        (b"\xff", bytes | Order, bytes | Order, b"\xff"),
        (KETTLE, bytes | Order, bytes | Order, KETTLE),
        (7, str | int, int | str, 7),
        (b"\xff", bytes, bytes, b"\xff"),
        (b"\xff", ..., bytes, b"\xff"),
        ("tea", ..., str, "tea"),
        ([1], ..., list[int], [1]),
        (Reply(b"mine"), Reply, bytes, b"mine"),
        (Reply(b"mine"), None, bytes, b"mine"),
        (7, Any, int, 7),
    ],
)
async def test_the_reply_is_of_the_type_that_the_handler_returns(
    result: Any, annotation: Any, asked: Any, reply: Any
) -> None:
    service, queue = service_of(bytes)
    service.handler(queue)(returning(result, annotation))
    async with service.running():
        assert await queue.request(b"?", asked, timeout=PATIENCE) == reply


@pytest.mark.parametrize(("result", "annotation"), [(None, None), (None, ...), (None, Retry | None), (7, None)])
def test_a_handler_that_returns_nothing_sends_no_reply(result: Any, annotation: Any) -> None:
    async def main() -> None:
        backend = connect_here()
        service, queue = service_of(bytes, backend)
        service.handler(queue)(returning(result, annotation))
        async with backend, service.running():
            with pytest.raises(tenure.TimedOut):
                await queue.request(b"?", object, timeout=PATIENCE)
            assert await queue.queue.stats() == Stats()

    run(main())  # in virtual time, as for all that waits for a reply that never comes


async def test_a_handler_may_reply_by_itself() -> None:
    service, queue = service_of(Order)

    @service.handler(queue)
    async def serve(order: Order, message: tenure.Message) -> Order | None:
        await message.reply(b"mine")
        return None

    async with service.running():
        assert await queue.request(KETTLE, bytes, timeout=PATIENCE) == b"mine"


async def test_verdicts_are_no_replies() -> None:
    service, queue = service_of(Order)
    seen: list[int] = []

    @service.handler(queue)
    async def serve(order: Order, message: tenure.Message) -> Order | Retry | Reject:
        seen.append(message.delivery_count)
        if order.item == "broken":
            return Reject("broken")
        return Retry(delay=0) if message.delivery_count == 1 else order

    async with service.running():
        assert await queue.request(KETTLE, Order, timeout=PATIENCE) == KETTLE
    assert seen == [1, 2]
    async with service:
        await queue.send(Order("broken"))
        await service.serve(until_empty=True)
        stats = await queue.queue.stats()
        assert stats.dead in (0, 1)  # the memory is new with each opening


async def test_an_answer_of_another_type_is_refused() -> None:
    service, queue = service_of(bytes)
    service.handler(queue)(returning("tea", str))
    async with service.running():
        with pytest.raises(tenure.DecodeError, match="the body is no JSON"):
            await queue.request(b"?", Order, timeout=PATIENCE)


def test_a_result_that_is_not_of_its_type_is_a_failure() -> None:
    async def main() -> None:
        backend = connect_here()
        service, queue = service_of(bytes, backend)
        errors: list[BaseException] = []
        never = tenure.RetryPolicy(never=(ConfigError,))
        service.handler(queue, retry=never, on_error=lambda _, error: errors.append(error))(returning(7, Order))
        async with backend, service.running():
            with pytest.raises(tenure.TimedOut):
                await queue.request(b"?", Order, timeout=PATIENCE)
            assert (await queue.queue.stats()).dead == 1
        assert [str(one) for one in errors] == ["the body must be Order, not int: 7"]

    run(main())


# --- what is refused ---


async def none() -> None: ...
async def three(a: Order, b: tenure.Message, c: int) -> None: ...
async def named(order: Order, *, shop: str) -> None: ...
async def generator(order: Order) -> Any:
    yield order


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (none, "the handler none needs nothing; a handler takes the body, the message, or both"),
        (three, "the handler three needs a, b, c; a handler takes"),
        (named, "the handler named needs order, shop; a handler takes"),
        (generator, "handler"),
        ("serve", "handler must be a function that takes the body, the message, or both, not 'serve'"),
    ],
    ids=["none", "three", "named", "generator", "text"],
)
def test_what_can_be_no_handler_is_refused_when_it_is_declared(handler: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Service("memory:").handler("orders")(handler)


async def twice(order: Order, other: Order) -> None: ...
async def two_messages(one: tenure.Message, two: tenure.Message) -> None: ...
async def untyped(order) -> None: ...  # type: ignore[no-untyped-def]
async def unresolved(order: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def for_threads(order: Order, message: tenure.sync.Message) -> None: ...
def for_a_loop(order: Order, message: tenure.Message) -> None: ...
def for_a_thread(order: Order, message: tenure.sync.Message) -> None: ...
async def of_refunds(refund: Refund) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "says"),
    [
        (twice, {}, "the handler twice takes order and other, both as the body; annotate the one"),
        (two_messages, {}, "both as the message"),
        (untyped, {}, "the parameter order of the handler untyped has no type; annotate it"),
        (
            unresolved,
            {},
            r"the annotation 'Missing' of order, of the handler unresolved, can't be resolved \(name",
        ),
        (for_threads, {}, "the handler for_threads is async, and gets a tenure.Message, not a tenure.sync.Message"),
        (for_a_loop, {}, "for_a_loop is a plain function, and gets a tenure.sync.Message, not a tenure.Message"),
        (
            for_a_thread,
            {"run_in": "process"},
            "is a plain function in a process, and gets a tenure.Received, not a tenure.sync.Message",
        ),
        (body_only, {"run_in": "process"}, "an async handler runs on the loop; leave out run_in='process'"),
        (body_only, {"concurrency": 0}, "concurrency"),
    ],
)
async def test_what_can_be_no_handler_is_refused_before_anything_runs(handler: Any, options: Any, says: str) -> None:
    service = Service("memory:")
    service.handler("orders", **options)(handler)
    with pytest.raises(ConfigError, match=says):
        await service.serve()
    assert "not open" in repr(service)


async def test_a_handler_of_another_type_than_its_queue_is_refused() -> None:
    service, queue = service_of(Order)
    service.handler(queue)(of_refunds)  # type: ignore[arg-type, unused-ignore]
    with pytest.raises(
        ConfigError, match="the parameter refund of the handler of_refunds is Refund, but the bodies of"
    ):
        await service.serve()


async def test_a_type_that_can_not_be_read_is_refused_before_anything_runs() -> None:
    service = Service("memory:")

    @service.handler("orders")
    async def serve(body: complex) -> None: ...

    with pytest.raises(ConfigError, match="a body can't be read as complex"):
        await service.serve()


def test_options_are_checked_when_they_are_written() -> None:
    service = Service("memory:")
    with pytest.raises(TypeError, match=r"handler\(\) has no option 'concurency'; did you mean 'concurrency'\?"):
        service.handler("orders", concurency=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"handler\(\) has no option 'sigterm'"):
        service.handler("orders", sigterm=False)
    with pytest.raises(TypeError, match=r"leader\(\) has no option 'tll'; did you mean 'ttl'\?"):
        service.leader("chair", tll=15)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"queue\(\) has no option 'lok'; did you mean 'lock'\?"):
        service.queue("orders", Order, lok=5)  # type: ignore[call-overload]


def test_a_queue_has_one_type_and_one_handler() -> None:
    service = Service("memory:")
    orders = service.queue("orders", Order, lock=5)
    assert service.queue("orders", Order, lock=5) is orders
    with pytest.raises(ConfigError, match="was declared as Order with lock=5, and now as Refund; declare it once"):
        service.queue("orders", Refund)
    service.handler(orders)(body_only)
    service.handler(orders, sessions=True)(body_only)  # its messages are others
    with pytest.raises(ConfigError, match="the queue 'orders' has a handler in this service: body_only; with a second"):
        service.handler("orders")(message_only)
    with pytest.raises(ConfigError, match=r"<TypedQueue 'orders' of Order> is a queue of another service"):
        Service("memory:").handler(orders)
    assert repr(service.queue("lines", list[Order])).startswith("<TypedQueue 'lines' of list[")


async def test_a_queue_is_used_only_while_its_service_is_open() -> None:
    service, queue = service_of(Order)
    with pytest.raises(ConfigError, match="the service is not open; use it in its handlers"):
        await queue.send(KETTLE)
    async with service:
        await queue.send(KETTLE)
    with pytest.raises(ConfigError, match="the service is not open"):
        await queue.send(KETTLE)
