"""JSON and typed bodies: what goes out, and what is made of what comes in."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from enum import Enum
from typing import Any

import pytest

from tenure.errors import ConfigError
from tenure.queue.bodies import decode, encode


class Colour(Enum):
    RED = "red"


@dataclass
class Line:
    article: str
    count: int = 1


@dataclass
class Order:
    number: int
    lines: list[Line]
    wanted: datetime | None = None
    day: date | None = None
    colour: Colour = Colour.RED
    tags: set[str] = field(default_factory=set)
    weights: dict[str, float] = field(default_factory=dict)
    either: int | str = 0
    anything: Any = None
    paid: bool = False


def test_a_dataclass_comes_back_as_it_was() -> None:
    order = Order(
        7,
        [Line("Öl", 2), Line("x")],
        datetime(2026, 1, 2, 3, tzinfo=UTC),
        date(2026, 1, 2),
        tags={"b", "a"},
        weights={"kg": 2},
        either="text",
        anything=[1, {"a": None}],
        paid=True,
    )
    body = encode(order)
    assert body.startswith('{"number":7,"lines":[{"article":"Öl","count":2}'.encode())
    assert decode(body, Order) == order


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"number":"7","lines":[]}', "the body.number must be int, not '7'"),
        (b'{"number":true,"lines":[]}', "the body.number must be int, not True"),
        (b'{"number":7,"lines":[{"article":5}]}', r"the body.lines\[0\].article must be str, not 5"),
        (b'{"number":7,"lines":[],"either":[]}', "the body.either fits none of int, str"),
        (b'{"number":7,"lines":[],"weights":{"kg":"x"}}', r"the body.weights\['kg'\] must be float"),
        (b'{"number":7,"lines":[],"colour":"blue"}', "'blue' is not a valid Colour"),
        (b'{"number":7}', "doesn't make a Order: .*lines"),
        (b'{"number":7,"lines":[],"more":1}', "has no field 'more' in Order"),
        (b"[]", "must be an object with the fields of Order"),
        (b"\xff", "codec can't decode"),
        (b"{", "Expecting"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(body: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode(body, Order)


def test_plain_kinds() -> None:
    assert decode(b"[1,2]", list[int]) == [1, 2]
    assert decode(b'{"a":[1]}', dict[str, list[int]]) == {"a": [1]}
    assert decode(b"1", float) == 1.0
    assert decode(b"null", type(None)) is None
    assert encode({"a": (1, None)}) == b'{"a":[1,null]}'
    assert encode({"b": Colour.RED}) == b'{"b":"red"}'
    with pytest.raises(ConfigError, match="object has no JSON form"):
        encode(object())
    with pytest.raises(ConfigError, match="can't be written as JSON"):
        encode(float("nan"))


def test_pydantic_models() -> None:
    pydantic = pytest.importorskip("pydantic")
    model: Any = pydantic.create_model("Model", number=(int, ...), when=(datetime | None, None))
    one = model(number=7, when=datetime(2026, 1, 1, tzinfo=UTC))
    assert decode(encode(one), model) == one
    assert encode([one]).startswith(b'[{"number":7')
    with pytest.raises(ValueError, match="number"):
        decode(b"{}", model)


def test_msgspec_structs() -> None:
    msgspec = pytest.importorskip("msgspec")
    struct: Any = msgspec.defstruct("Struct", [("number", int), ("name", str, "x")])
    one = struct(7)
    assert decode(encode(one), struct) == one
    with pytest.raises(ValueError, match="number"):
        decode(b"{}", struct)
