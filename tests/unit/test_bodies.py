"""JSON and typed bodies: writing and reading."""

from __future__ import annotations

import collections
import enum
import math
import pickle
import re
import sys
import typing
from dataclasses import KW_ONLY, InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Required, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import ReadOnly, TypeAliasType

from tenure._queue.bodies import decode, encode
from tenure.errors import ConfigError, DecodeError

T = TypeVar("T")
CustomerId = NewType("CustomerId", int)


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Corner(Enum):
    LEFT = (0, 1)


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


class Address(TypedDict):
    street: str
    floor: NotRequired[int]


class Tariff(TypedDict):
    kind: ReadOnly[Literal["tariff"]]
    price: Required[ReadOnly[int]]
    note: ReadOnly[NotRequired[str]]


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclass
class Tree(Generic[T]):
    value: T
    branches: list[Tree[T]] = field(default_factory=list)


@dataclass
class Ids(Tree[UUID]):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    depth: int
    name: str = "x"


@dataclass
class Cat:
    name: str


@dataclass
class Dog:
    name: str
    breed: str


@dataclass
class Circle:
    kind: Literal["circle"]
    size: int


@dataclass
class Square:
    kind: Literal["square"]
    size: int


@dataclass
class Even:
    number: int
    _: KW_ONLY
    seed: InitVar[int] = 0
    half: int = field(init=False, default=0)

    def __post_init__(self, seed: int) -> None:
        if self.number % 2:
            raise ValueError(f"{self.number} is odd")
        self.half = self.number // 2 + seed


class Model(pydantic.BaseModel):
    number: int
    price: Decimal = Decimal("1.5")
    sold: datetime | None = pydantic.Field(default=None, alias="soldAt")


class Lion(pydantic.BaseModel):
    kind: Literal["lion"]


class Bear(pydantic.BaseModel):
    kind: Literal["bear"]


class Struct(msgspec.Struct):
    number: int
    when: datetime | None = None


@pydantic.dataclasses.dataclass
class Checked:
    number: Annotated[int, pydantic.Field(gt=0)]


@dataclass
class Mixed:
    models: list[Model]
    structs: dict[str, Struct]
    checked: Checked | None = None
    positive: Annotated[int, pydantic.Field(gt=0)] = 1
    small: Annotated[int, msgspec.Meta(lt=10)] = 1


ID = UUID("12345678-1234-5678-1234-567812345678")
WHEN = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)

ROUND_TRIPS: list[tuple[Any, Any]] = [
    (UUID, ID),
    (Decimal, Decimal("12.50")),
    (IPv4Address, IPv4Address("10.0.0.1")),
    (Path, Path("/srv/ä")),
    (PurePosixPath, PurePosixPath("a/b")),
    (bytes, b"\x00\xff"),
    (bytearray, bytearray(b"x")),
    (datetime, WHEN),
    (datetime, datetime(2026, 1, 2)),  # a naive one stays so
    (date, date(2026, 1, 2)),
    (time, time(3, 4, 5)),
    (timedelta, timedelta(days=-3, microseconds=7)),
    (timedelta, timedelta()),
    (Literal["a", 1, None], 1),
    (Literal[Colour.GREEN], Colour.GREEN),
    (Colour, Colour.GREEN),
    (Level, Level.HIGH),
    (Right, Right.READ | Right.WRITE),
    (Corner, Corner.LEFT),
    (CustomerId, CustomerId(7)),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2, 3)),
    (tuple[()], ()),
    (tuple, (1, "a")),
    (list[UUID], [ID]),
    (frozenset[int], frozenset({1, 2})),
    (set[tuple[int, str]], {(1, "a"), (2, "b")}),
    (collections.deque[int], collections.deque([1])),
    (collections.abc.Sequence[int], [1]),
    (collections.abc.Mapping[str, int], {"a": 1}),
    (dict[int, str], {1: "a", -2: "b"}),
    (dict[UUID, list[int]], {ID: [1]}),
    (dict[Colour, int], {Colour.RED: 1}),
    (dict[Level, int], {Level.LOW: 1}),
    (dict[date, int], {date(2026, 1, 2): 3}),
    (dict[bool, int], {True: 1, False: 0}),
    (dict[int | None, int], {None: 1, 5: 2}),
    (dict[float, float], {1.5: 2.5}),
    (Address, {"street": "Elm", "floor": 2}),
    (Address, {"street": "Elm"}),
    (list[Point], [Point(1, 2), Point(3)]),
    (Options, Options(depth=3)),
    (Tree[int], Tree(1, [Tree(2), Tree(3, [Tree(4)])])),
    (Tree[Colour | None], Tree(Colour.RED, [Tree(None)])),
    (Ids, Ids(ID, [Tree(ID)])),
    (UUID | str, ID),
    (UUID | str, "no id"),
    (float | int, 1),
    (int | float, 1.0),
    (list[Cat | Dog], [Cat("Tom"), Dog("Rex", "pug")]),
    (list[Circle | Square], [Square("square", 1), Circle("circle", 2)]),
    (Even, Even(4)),
    (Annotated[int, "of no meaning"], 3),
    (Model, Model(number=1, soldAt=WHEN)),
    (list[Model], [Model(number=1)]),
    (Struct, Struct(1, WHEN)),
    (dict[str, Struct | None], {"a": Struct(1), "b": None}),
    (Checked, Checked(5)),
    (list[Annotated[Lion | Bear, pydantic.Field(discriminator="kind")]], [Bear(kind="bear"), Lion(kind="lion")]),
    (Lion | Bear | None, Bear(kind="bear")),
    (list[pydantic.HttpUrl], [pydantic.HttpUrl("https://host/")]),
    (Mixed, Mixed([Model(number=1, soldAt=WHEN)], {"a": Struct(1, WHEN)}, Checked(2), 5, 6)),
]


@pytest.mark.parametrize(("kind", "value"), ROUND_TRIPS, ids=[str(kind) for kind, _ in ROUND_TRIPS])
def test_a_value_survives_writing_and_reading(kind: Any, value: Any) -> None:
    came = decode(encode(value), kind)
    assert came == value
    assert type(came) is type(value)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Order,
        lines=st.lists(st.from_type(Line), max_size=2),
        wanted=st.none() | st.datetimes(timezones=st.just(UTC)),
        weights=st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
        anything=st.none() | st.integers() | st.text(),
    ),
    st.timedeltas() | st.decimals(allow_nan=False, allow_infinity=False),
)
def test_any_order_survives_writing_and_reading(order: Order, amount: timedelta | Decimal) -> None:
    assert decode(encode(order), Order) == order
    assert decode(encode(amount), type(amount)) == amount


def test_a_dataclass_is_the_json_that_any_client_would_send() -> None:
    order = Order(7, [Line("Öl", 2)], datetime(2026, 1, 2, 3, tzinfo=UTC), tags={"b", "a"})
    assert encode(order).startswith('{"number":7,"lines":[{"article":"Öl","count":2}],"wanted":"2026'.encode())
    assert encode({"a": (1, None), "b": Colour.RED, "c": timedelta(minutes=-90)}) == (
        b'{"a":[1,null],"b":"red","c":"-PT5400S"}'
    )
    assert decode(b'"P1W2DT3H4M5.5S"', timedelta) == timedelta(9, 5.5, hours=3, minutes=4)
    assert decode(b"90", timedelta) == timedelta(seconds=90)
    assert decode(b"12.5", Decimal) == Decimal("12.5")
    assert decode(b"1", float) == 1.0
    assert decode(b"[1]", typing.List[int]) == [1]  # noqa: UP006


@dataclass
class Price:
    exact: Decimal
    close: float = 0.0
    level: Level | None = None
    wait: timedelta | None = None
    note: Any = None
    model: Model | None = None
    struct: Struct | None = None


def test_a_decimal_has_all_digits_that_were_sent_as_a_number() -> None:
    text = b"19999999999999999.99"
    assert decode(text, Decimal) == Decimal("19999999999999999.99")
    assert decode(b"[0.1,1e400,-1.00000000000000000001]", list[Decimal]) == [
        Decimal("0.1"), Decimal("1e400"), Decimal("-1.00000000000000000001")
    ]  # fmt: skip
    body = b'{"exact":%s,"close":%s,"note":[{"a":%s}],"wait":0.10000000000000000001,"more":%s,'
    body += b'"model":{"number":1,"price":%s},"struct":{"number":1,"unknown":%s}}'
    price = decode(body.replace(b"%s", text), Price)
    assert price.exact == Decimal("19999999999999999.99")
    assert [type(price.close), type(price.note[0]["a"])] == [float, float]
    assert price.close == price.note[0]["a"] == 2e16
    assert price.wait == timedelta(seconds=0.1)
    assert price.model == Model(number=1, price=Decimal("2E+16"))  # pydantic reads it from a float, nested or not
    with pytest.raises(DecodeError, match=r"the body.level must be one of 1, 2, not 1\.0"):
        decode(b'{"exact":1,"level":1.00000000000000000001}', Price)


@pytest.mark.parametrize("exact", [Any, dict[str, Any]])
def test_json_has_no_other_numbers(exact: Any) -> None:
    for name in (b"NaN", b"Infinity", b"-Infinity"):
        with pytest.raises(DecodeError, match=f"the body is no JSON: it has no {name.decode()}"):
            decode(b'{"a":%s}' % name, exact)


def test_fields_that_a_type_does_not_know_are_ignored() -> None:
    newer = b'{"number":7,"lines":[{"article":"x","colour":"red"}],"more":{"a":1},"half":9}'
    assert decode(newer, Order) == Order(7, [Line("x")])
    assert decode(b'{"street":"Elm","town":"Ulm"}', Address) == {"street": "Elm"}
    assert decode(b"[1,2,3]", Point) == Point(1, 2)
    assert decode(b'{"x":1}', Point) == Point(1)
    assert decode(b'{"number":4,"half":9,"seed":1}', Even).half == 3


@pytest.mark.parametrize(
    ("body", "kind", "complaint"),
    [
        (b'{"number":"7","lines":[]}', Order, "the body.number must be int, not '7'"),
        (b'{"number":true,"lines":[]}', Order, "the body.number must be int, not True"),
        (b'{"number":7.0,"lines":[]}', Order, "the body.number must be int, not 7.0"),
        (b'{"number":7,"lines":[{"article":5}]}', Order, "the body.lines[0].article must be str, not 5"),
        (b'{"number":7,"lines":[{"article":"' + b"x" * 99 + b'","count":"no"}]}', Order, "count must be int, not 'no'"),
        (b'{"number":7,"lines":[],"either":[]}', Order, "the body.either fits none of int, str, being []"),
        (b'{"number":7,"lines":[],"wanted":"soon"}', Order, "the body.wanted must be a date or time in ISO 8601"),
        (b'{"number":7,"lines":[],"weights":{"kg":"x"}}', Order, "the body.weights['kg'] must be float, not 'x'"),
        (b'{"number":7,"lines":[],"colour":"blue"}', Order, "the body.colour must be one of 'red', 'green', not 'bl"),
        (b'{"number":7}', Order, "the body has no 'lines', which Order must have"),
        (b"[]", Order, "the body must be an object with the fields of Order, not []"),
        (b"\xff", Order, "the body is no JSON: 'utf-8' codec can't decode"),
        (b"{", Order, "the body is no JSON: Expecting"),
        (b"[" * 100_000, list, "the body is no JSON: "),
        (b"[1]", tuple[int, str], "the body must be a list of 2, not [1]"),
        (b'[1,"a"]', tuple[int, ...], "the body[1] must be int, not 'a'"),
        (b'{"a":1}', dict[int, int], "the body has the key 'a', which must be int, not 'a'"),
        (b'{"1.0":1}', dict[int, int], "the body has the key '1.0', which must be int"),
        (b"[[1],[1]]", set[Any], "the body can't be a set: "),  # the rest are Python's words, which differ
        (b"3", Literal["a", 4], "the body must be 'a' or 4, not 3"),
        (b"true", Level, "the body must be one of 1, 2, not True"),
        (b"true", Literal[1], "the body must be 1, not True"),
        (b"1.0", Level, "the body must be one of 1, 2, not 1.0"),
        (b"3.0", Right, "the body must be one of 1, 2, not 3.0"),
        (b'{"NaN":1}', dict[float, int], "the body has the key 'NaN', which must be float"),
        (b"NaN", float, "the body is no JSON: it has no NaN"),
        (b"1e400", float, "the body must be float, and is too large for one"),
        (b'"NaN"', Decimal, "the body must be a Decimal that is a number, not 'NaN'"),
        (b"Infinity", Decimal, "the body is no JSON: it has no Infinity"),
        (b'{"1":1,"1.0":2}', dict[Decimal, int], "the body has the key '1.0', which equals an earlier one"),
        (b'"x"', UUID, "the body must be a UUID (UUID), not 'x'"),
        (b'"x"', Decimal, "the body must be a Decimal, as text or number, not 'x'"),
        (b'"*"', bytes, "the body must be bytes in base64 (bytes), not '*'"),
        (b'"P"', timedelta, "the body must be a duration as in ISO 8601 (PT90S) or seconds, not 'P'"),
        (b'"P9999999999D"', timedelta, "the body must be a timedelta, not"),
        (b"1" + b"0" * 400, float, "is too large for one"),
        (b"{}", Address, "the body has no 'street', which Address must have"),
        (b"[]", Point, "the body must be a list of at least 1 for a Point, not []"),
        (b'{"number":3}', Even, "the body is no valid Even: 3 is odd"),
        (b'{"kind":"oval"}', Circle | Square, "Square: kind must be 'square', not 'oval'"),
        (b'{"number":3}', Tree[int] | None, "the body has no 'value', which Tree must have"),
        (b'[{"number":"x"}]', list[Model], "the body[0].number does not fit: Input should be a valid integer, unable"),
        (b"{}", Model, "the body.number does not fit: Field required"),
        (b"{", Model, "the body does not fit: Invalid JSON"),
        (b'{"a":{"number":"x"}}', dict[str, Struct], "the body['a'].number does not fit: Expected `int`, got `str`"),
        (b"{}", Struct, "the body does not fit: Object missing required field `number`"),
        (b'{"number":-1}', Checked, "the body.number does not fit: Input should be greater than 0"),
        (b'{"models":[],"structs":{},"positive":0}', Mixed, "the body.positive does not fit: Input should be great"),
        (b'{"models":[],"structs":{},"small":10}', Mixed, "the body.small does not fit: Expected `int` <= 9"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_with_its_place(body: bytes, kind: Any, complaint: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(body, kind)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 600
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@dataclass
class Branch:
    kids: list[Branch]


@dataclass
class Left:
    child: Left | Twin | None
    x: int = 0


@dataclass
class Twin:
    child: Left | Twin | None
    x: str = ""


def steps(body: bytes, kind: Any) -> int:
    """Return how many functions are called to read *body*."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        decode(body, kind)
    except DecodeError:
        pass
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    ("kind", "opened", "middle", "closed"),
    [
        (Branch, b'{"kids":[', b"1", b"]}"),
        (Left | Twin, b'{"child":', b"1", b"}"),
        (Left | Twin, b'{"child":', b"null", b',"x":""}'),
        (Left | Twin, b'{"child":', b"null", b',"x":"","y":1}'),
        (list[Left] | list[Twin], b'[{"child":', b'{"child":1}', b"}]"),
    ],
)
def test_the_cost_of_a_body_grows_with_its_length_only(kind: Any, opened: bytes, middle: bytes, closed: bytes) -> None:
    steps(opened + middle + closed, kind)  # builds the readers once
    few, more = (steps(opened * depth + middle + closed * depth, kind) for depth in (6, 12))
    assert more < 3 * few


@pytest.mark.parametrize("depth", [60, 150, 250, 400, 2_000, 200_000])
@pytest.mark.parametrize(
    ("kind", "opened", "closed"),
    [(Branch, b'{"kids":[', b"]}"), (Left | Twin, b'{"child":', b"}"), (dict[str, Left | Twin], b'{"a":', b"}")],
)
def test_a_deep_body_that_does_not_fit_is_a_decode_error(kind: Any, opened: bytes, closed: bytes, depth: int) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(opened * depth + b"1.5" + closed * depth, kind)
    assert len(str(caught.value)) < 1000


def test_a_value_too_deep_to_be_written_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ConfigError, match="json, a list, is nested too deeply, or in itself"):
        encode(value)


@dataclass
class Placed:
    id: int


@dataclass
class Cancelled:
    id: int
    reason: str = ""


@dataclass
class Grown:
    kind: Literal["grown"]
    size: int
    age: int = 0


class Opened(msgspec.Struct, tag="opened"):
    id: int


class Closed(msgspec.Struct, tag="closed"):
    id: int
    by: str = ""


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(alias="No")
    who: str = pydantic.Field(default="", validation_alias=pydantic.AliasChoices("by", pydantic.AliasPath("from", 0)))


@pytest.mark.parametrize(
    "kind", [Placed | Cancelled, Cancelled | Placed, Placed | Cancelled | None, Placed | Cancelled | int]
)
def test_a_union_never_reads_a_member_that_knows_less_where_the_likeliest_misfits(kind: Any) -> None:
    with pytest.raises(DecodeError, match=r"^the body\.reason must be str, not None$"):
        decode(b'{"id":1,"reason":null}', kind)
    with pytest.raises(DecodeError, match=r"^the body\[0\]\.reason must be str, not None$"):
        decode(b'[{"id":1,"reason":null}]', list[kind])
    assert decode(b'{"id":1,"reason":"late"}', kind) == Cancelled(1, "late")


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        (b'{"name":"Tom"}', Dog | Cat, Cat("Tom")),  # of those that know equally many fields, the one that fits
        (b'{"kind":"circle","size":1,"age":2}', Grown | Circle, Circle("circle", 1)),  # a literal decides
        (b'{"type":"opened","id":1,"by":"x"}', Closed | Opened, Opened(1)),
        (b'{"No":1,"id":2,"from":["x"]}', Cancelled | Aliased, Aliased.model_validate({"No": 1, "by": "x"})),
        (b'{"id":1,"reason":null}', Placed | Cancelled | dict[str, Any], {"id": 1, "reason": None}),
        (b'{"other":1}', dict[str, int] | Cat, {"other": 1}),
    ],
)
def test_a_union_takes_the_member_that_an_object_is_most_likely(body: bytes, kind: Any, value: Any) -> None:
    assert decode(body, kind) == value


def test_a_union_is_read_in_the_order_written_where_text_may_be_both() -> None:
    body = encode(ID)
    assert decode(body, UUID | str) == ID
    assert decode(body, str | UUID) == str(ID)  # equal as types, and another order
    assert decode(body, list[UUID | str] | UUID) == ID


@dataclass
class Nothing:
    pass


class Blank(pydantic.BaseModel):
    pass


class Numbers(pydantic.RootModel[dict[str, int]]):
    pass


PlacedOne = NewType("PlacedOne", Placed)
AnyPlaced = TypeAliasType("AnyPlaced", Placed | None)
Maybe = TypeAliasType("Maybe", T | None, type_params=(T,))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (PlacedOne | Cancelled, Cancelled(1, "late")),  # a type with another name is told apart as well
        (Annotated[Placed, "a"] | Annotated[Cancelled, "b"], Cancelled(1, "late")),
        (Annotated[Placed, pydantic.Tag("a")] | Cancelled, Cancelled(1, "late")),
        (AnyPlaced | Cancelled, Cancelled(1, "late")),
        (Maybe[Placed] | Cancelled, Cancelled(1, "late")),
        (Nothing | Placed, Placed(1)),  # fields are not ignored by a type that has none
        (Nothing | Placed, Nothing()),
        (Blank | Model, Model(number=1)),
        (Line | Numbers, Numbers({"article": 3})),  # "root" is no field in JSON
        (Level | int, Level.HIGH),
        (Level | int, 7),
        (int | Level, 2),
        (float | CustomerId, 2**60 + 1),
        (datetime | str | date, date(2026, 1, 2)),
        (datetime | str | date, datetime(2026, 1, 2)),
        (date | str | datetime, date(2026, 1, 2)),
        (dict[int | str, int], {1: 2, "a": 3}),
        (dict[str | int, int], {"1": 2}),
    ],
)
def test_a_member_of_a_union_survives_writing_and_reading(kind: Any, value: Any) -> None:
    came = decode(encode(value), kind)
    assert came == value
    assert type(came) is type(value)


@dataclass
class Pair(Generic[T]):
    first: T
    second: list[T]


@dataclass
class Lists(Pair[list[T]], Generic[T]):
    second: T  # type: ignore[assignment]
    third: T | None = None


@dataclass
class Last(Lists[int]):
    fourth: int = 0


def test_a_type_variable_is_that_of_the_class_which_declares_the_field() -> None:
    for kind, value in [(Lists[int], Lists([1], 2, 3)), (Last, Last([1], 2, 3, 4))]:
        assert decode(encode(value), kind) == value
    with pytest.raises(DecodeError, match=r"the body\.first must be a list, not 1"):
        decode(b'{"first":1,"second":2}', Lists[int])


@dataclass
class Sealed:
    data: bytes


class Sent(pydantic.BaseModel):
    data: bytes


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Annotated[bytes, pydantic.Field(min_length=1)], b"\xfb\xff?"),  # base64, though pydantic itself has text
        (Annotated[list[Sealed], pydantic.Field(min_length=1)], [Sealed(b"ab")]),
        (Annotated[list[Sent], pydantic.Field(min_length=1)], [Sent(data=b"ab")]),
        (Annotated[Sent | None, pydantic.Field(strict=True)], Sent(data=b"ab")),
        (pydantic.Base64Bytes, b"raw"),
        (Annotated[list[Struct], pydantic.Field(description="of any type")], [Struct(1)]),
        (Annotated[Path, msgspec.Meta(description="of any type")], Path("a")),
    ],
)
def test_a_type_with_an_annotation_of_a_library_survives_writing_and_reading(kind: Any, value: Any) -> None:
    assert decode(encode(value), kind) == value


@dataclass
class Endless(Generic[T]):
    inner: Endless[list[T]] | None = None


class Untagged(msgspec.Struct):
    either: Struct | Closed | None = None


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Untagged, "Untagged: msgspec can't read it (If a type union contains multiple Struct types"),
        (Annotated[list[Struct], pydantic.Field(min_length=1)], "pydantic can't read it (Unable to generate"),
        (Endless[int], "as there is no end to the types in it"),
        ([int], "[<class 'int'>]; there are dataclasses"),
        (Line("x"), "Line(article='x', count=1); there are"),
        (Struct(1), "Struct(number=1, when=None); there are"),
        (Model(number=1), "; there are dataclasses"),
    ],
)
def test_a_type_that_its_library_can_not_read_or_that_is_none_is_refused(kind: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match="a body can't be read as") as caught:
        decode(b"{}", kind)
    assert complaint in str(caught.value)


@dataclass
class Asserted:
    number: int

    def __post_init__(self) -> None:
        assert self.number > 0, "not positive"


class Two(str):
    def __new__(cls, one: str, two: str) -> Two:
        return super().__new__(cls, one + two)


def test_an_error_of_the_own_code_of_a_type_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match=r"the body\[0\] is no valid Asserted: not positive"):
        decode(b'[{"number":-1}]', list[Asserted])
    with pytest.raises(DecodeError, match="the body must be Two, not 'x'"):
        decode(b'"x"', Two)


@pytest.mark.parametrize("kind", [object(), complex, Line | complex, dict[str, collections.abc.Callable[[], int]]])
def test_a_type_that_can_never_be_read_is_refused_for_any_body(kind: Any) -> None:
    with pytest.raises(ConfigError, match="a body can't be read as"):
        decode(b"null", kind)


def test_a_type_whose_annotations_name_nothing_is_refused() -> None:
    @dataclass
    class Inner:
        pass

    @dataclass
    class Outer:
        inner: Inner

    with pytest.raises(ConfigError, match=r"Outer, as its annotations .*name 'Inner' is not defined.* at the top of"):
        decode(b"{}", Outer)


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [("math.Number", "module 'math' has no attribute 'Number'"), ("1 / 0", "division by zero"), ("int |", "int |")],
)
def test_a_type_with_an_annotation_that_fails_is_refused(annotation: str, problem: str) -> None:
    kind = make_dataclass("Wrong", [("number", annotation)])
    kind.__module__ = __name__
    with pytest.raises(ConfigError, match=rf"Wrong, as its annotations .*{re.escape(problem)}.* at the top of"):
        decode(b"{}", kind)


def test_a_field_that_is_read_only_is_read_as_its_type() -> None:
    tariff: Tariff = {"kind": "tariff", "price": 7}
    assert decode(b'{"kind":"tariff","price":7}', Tariff) == tariff
    assert decode(b'{"kind":"tariff","price":7}', Address | Tariff) == tariff
    with pytest.raises(DecodeError, match="has no 'price'"):
        decode(b'{"kind":"tariff"}', Tariff)
    with pytest.raises(DecodeError, match="note must be str, not 1"):
        decode(b'{"kind":"tariff","price":7,"note":1}', Tariff)


@dataclass
class Half:
    number: int = field(init=False)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (object(), "object has no JSON form"),
        ({"a": [1, Line(object(), 2)]}, r"object has no JSON form, at \['a'\]\[1\]\['article'\]"),  # type: ignore[arg-type]
        ({(1, 2): 3}, r"tuple can't be a key in JSON, at \[\(1, 2\)\]"),
        (math.nan, "not JSON compliant"),
        ({"a": Decimal("NaN")}, "NaN is not a number in JSON"),
        ("\ud800", "can't be written as JSON"),
        ({Decimal("NaN"), Decimal(1)}, "can't be written as JSON"),
        (Half(), r"^json, a Half, can't be written as JSON: 'Half' object has no attribute 'number'$"),
        ([10**5000], "^json, a list, can't be written as JSON: Exceeds the limit"),
    ],
)
def test_a_value_without_a_json_form_is_refused_with_its_place(value: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        encode(value)


NEWER = """
type Ids = list[int]
type Pair[A] = tuple[A, A]
type Json = dict[str, Json] | list[Json] | str | int | None

@dataclass
class Page[T]:
    items: list[T]
    next: "Page[T] | None" = None

@dataclass
class Uses:
    ids: Ids
    pair: Pair[float]
    page: Page[str]
    deep: Json = None

class Bounded[T: int](NamedTuple):
    a: T

VALUES = [(Uses, Uses([1], (1.0, 2.0), Page(["a"], Page([])), {"a": [1, {"b": None}]})), (Bounded, Bounded(1))]
MISFITS = [
    (Page[str], b'{"items":[],"next":{"items":[1]}}', "the body.next.items[0] must be str, not 1"),
    (Bounded, b'["x"]', "the body[0] must be int, not 'x'"),
    (Ids, b'["x"]', "the body[0] must be int, not 'x'"),
    (Json, b'{"a":1.5}', "the body fits none of dict[str, Json], list[Json], str, int, NoneType (dict[str, Json]: "
     "['a'] fits none of dict[str, Json], list[Json], str, int, NoneType, being 1.5)"),
]
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="its syntax is newer")
def test_type_parameters_in_the_syntax_of_python_3_12(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = ModuleType("newer")
    monkeypatch.setitem(sys.modules, "newer", newer)
    vars(newer).update(dataclass=dataclass, NamedTuple=NamedTuple)
    exec(NEWER, vars(newer))
    for kind, value in newer.VALUES:
        assert decode(encode(value), kind) == value
    for kind, body, complaint in newer.MISFITS:
        with pytest.raises(DecodeError) as caught:
            decode(body, kind)
        assert str(caught.value) == complaint
