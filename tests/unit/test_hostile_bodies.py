"""Whatever a body has in it, reading it as any type raises ``DecodeError`` at most, soon, and without much memory."""

from __future__ import annotations

import enum
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePosixPath
from types import GenericAlias
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, get_origin
from uuid import UUID

import msgspec
import pydantic
import pydantic.dataclasses
import pytest

from tenure._queue.bodies import decode, loads, text_in
from tenure._queue.typed_collisions import COLLISIONS_MAX, UNCHECKED
from tenure._queue.typed_libraries import library_of
from tenure._queue.typed_screening import screened_reader
from tenure._queue.typed_values import SHOWN_WHY
from tenure.errors import DecodeError

ERROR_MAX = 1_500

SAME_HASH = 2**61 - 1
"""The numbers that it divides have one hash, and so have the ids and decimals made of them."""


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Mode(enum.IntFlag):
    READ = 1
    WRITE = 2


class Number(int):
    pass


class Text(str):
    __slots__ = ()


@dataclass
class Line:
    number: int
    price: Decimal | None = None
    nested: Line | None = None


class Pair(NamedTuple):
    number: int
    text: str


class Fields(TypedDict):
    length: timedelta


class Struct(msgspec.Struct):
    value: int | None = None
    text: str | None = None
    length: timedelta | None = None
    at: datetime | None = None
    id: UUID | None = None
    exact: Decimal | None = None
    content: bytes | None = None
    size: float | None = None
    any: Any = None
    nested: Struct | None = None


class Model(pydantic.BaseModel):
    value: int | None = None
    text: str | None = None
    length: timedelta | None = None
    at: datetime | None = None
    id: UUID | None = None
    exact: Decimal | None = None
    content: bytes | None = None
    size: float | None = None
    any: Any = None
    nested: Model | None = None


@pydantic.dataclasses.dataclass
class Checked:
    length: timedelta


PLAIN: list[Any] = [
    *(bool, int, float, str, None, bytes, bytearray, datetime, date, time_of_day, timedelta, Decimal, UUID),
    *(PurePosixPath, IPv4Address, IPv6Address, IPv4Network, IPv6Network, IPv4Interface, IPv6Interface),
    *(Colour, Right, Mode, Number, Text, Any, Literal[1, "a"]),
]
RECORDS: list[Any] = [Line, Pair, Fields, Struct, Model, Checked]
UNIONS: list[Any] = [
    *(int | str | None, date | datetime, Decimal | int, timedelta | float, UUID | str),
    Line | Struct | None,
]
KINDS: list[Any] = [
    *PLAIN,
    *RECORDS,
    *UNIONS,
    *(GenericAlias(list, (kind,)) for kind in [*PLAIN, *RECORDS]),
    *(GenericAlias(set, (kind,)) for kind in PLAIN),
    *(GenericAlias(dict, (str, kind)) for kind in [*PLAIN, *UNIONS]),
    *(GenericAlias(dict, (kind, int)) for kind in PLAIN),
    *(GenericAlias(tuple, (kind, ...)) for kind in PLAIN),
]

DIGITS = "9" * 5_000
TEXTS = [
    *("", "\0", "\n", "\ud800", "\u202e", "é", "x" * 100_000, "true", "null", "nan", "NaN", "sNaN", "-Infinity", "-0"),
    *("P99999999999999D", "P1000000000D", f"P{DIGITS}D", f"PT{DIGITS}S", f"P{DIGITS}", "-P999999999DT86399.999999S"),
    *("P\u0663D", "P", "PT", "-P", "P1", "PT0.9999999999S", "P1W" * 1_000, "1e1000000000", "1e-1000000000"),
    *(f"1e{DIGITS}", "1e999999999999999999", DIGITS, "0x10", "1_000", "\u0663" * 32, "urn:uuid:" * 20, "{" * 50),
    *("0000-00-00", "9999-12-31T23:59:59.999999-23:59", "2020-01-01T00:00:00+99:99", "2020-W53-7", "24:00"),
    *("2020-01-01\ud80010:00", "1.2.3.4/" + DIGITS, "0.0.0.0/-1", "::" * 1_000, "fe80::1%\n", "=" * 5_000, "AAA"),
]
LITERALS = [
    *("", "\0", "nul", "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", DIGITS, f"-{DIGITS}", "9" * 4_000),
    *(f"{DIGITS}.5", f"1e{DIGITS}", f"1e-{DIGITS}", f"0.{DIGITS}", f"1{'0' * 5_000}e-5000", "5e-324", "-1", "-0.0"),
    *("9" * 400, "1e308", "true", "null", "[]", "{}", '"', '"\\ud800"', '"\\u12', "[" * 100_000, '{"a":' * 100_000),
    *("[" * 400 + "]" * 400, '{"nested":' * 400 + "1" + "}" * 400, '{"a":1,"a":[]}', "1 2", "\ufeff1"),
]
ODD = [one.encode("utf-8", "surrogatepass") for one in [*LITERALS, *map(json.dumps, TEXTS)]]
PIECES = [b"", b"9" * 30, b'"', b"\xff", b"[", b"-", b"e"]
BYTES = [b"\xff", b"\xff\xfe{\0", b"\0\0\0{", b"\xef\xbb\xbf1", b"\x80" * 1_000]


def bodies_of(odd: bytes) -> list[bytes]:
    """Return bodies with an odd value in them: alone, in a list, as a value and as a key."""
    names = [name.encode() for name in Struct.__struct_fields__]
    key = odd if odd.startswith(b'"') else json.dumps(odd.decode("utf-8", "surrogatepass")).encode()
    alone = [odd, b"[" + odd + b"]", b"[" + odd + b",1]", b'{"a":' + odd + b"}", b"{" + key + b":1}"]
    return [*alone, *(b'{"number":1,"%b":%b}' % (name, odd) for name in [*names, b"price", b"number"])]


def refusal(read: Callable[..., object], *given: object) -> str:
    """Return the text with which a body is refused; empty if it is read. Any other exception fails the test."""
    try:
        read(*given)
    except DecodeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind)[:40])
def test_an_odd_value_is_read_or_refused(kind: Any) -> None:
    """With a seed of its own for each kind, so that it says what it found."""
    chance = random.Random(repr(kind))
    few = [*PLAIN, *RECORDS]
    for odd in ODD if kind in few else chance.sample(ODD, 25):
        for body in bodies_of(odd) if kind in RECORDS else chance.sample(bodies_of(odd)[:5], 3):
            assert len(refusal(decode, body, kind)) <= ERROR_MAX
    for body in BYTES:
        assert len(refusal(decode, body, kind)) <= ERROR_MAX


@pytest.mark.parametrize("body", [*ODD, *BYTES], ids=lambda body: ascii(body[:20]))
def test_json_and_text_are_read_or_refused(body: bytes) -> None:
    for one in [body, *bodies_of(body)] if body not in BYTES else [body]:
        for reads in (loads, text_in):
            assert len(refusal(reads, one)) <= ERROR_MAX


@pytest.mark.parametrize("seed", range(5))
def test_a_body_that_was_changed_at_random_is_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    good = json.dumps(
        {
            "number": 1,
            "text": "tea",
            "length": "P1DT5.5S",
            "price": 1.5,
            "id": str(UUID(int=7)),
            "at": "2026-11-29T10:00:00Z",
            "nested": {"number": 2, "length": 3},
        }
    ).encode()
    for _ in range(300):
        changed = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(changed))
            changed[place : place + chance.randint(0, 3)] = chance.choice(PIECES)
        for kind in RECORDS:
            assert len(refusal(decode, bytes(changed), kind)) <= ERROR_MAX


# --- time and memory ---------------------------------------------------------------------------------------------


def numbers_of_one_hash(count: int) -> list[int]:
    return [factor * SAME_HASH for factor in range(1, count + 1)]


COLLIDING = [
    (set[int], numbers_of_one_hash(20_000)),
    (frozenset[Decimal], numbers_of_one_hash(20_000)),
    (set[UUID], [str(UUID(int=number)) for number in numbers_of_one_hash(20_000)]),
    (dict[int, int], {str(number): 1 for number in numbers_of_one_hash(20_000)}),
]


@pytest.mark.parametrize(("kind", "value"), COLLIDING, ids=[str(kind) for kind, _ in COLLIDING])
def test_values_chosen_to_have_one_hash_hold_up_nobody(kind: Any, value: Any) -> None:
    """A set of a megabyte of them takes ten seconds, in which no other thread runs."""
    with pytest.raises(DecodeError, match=f"more than {COLLISIONS_MAX} different values with one hash"):
        decode(json.dumps(value).encode(), kind)


@dataclass(frozen=True)
class Point:
    x: int


class FrozenStruct(msgspec.Struct, frozen=True):
    x: int


class FrozenModel(pydantic.BaseModel, frozen=True):
    x: int


class Numbers(pydantic.BaseModel):
    numbers: list[int]


Kind = TypeVar("Kind")


def struct_of(kind: Any) -> Any:
    return msgspec.defstruct("Holder", [("held", kind)])


def model_of(kind: Any) -> Any:
    return pydantic.create_model("Holder", held=(kind, ...))


class OfAny(msgspec.Struct, Generic[Kind]):
    held: set[Kind]


class ModelOfAny(pydantic.BaseModel, Generic[Kind]):
    held: dict[Kind, int]


@pydantic.dataclasses.dataclass
class CheckedSet:
    held: frozenset[int]


@dataclass
class Nesting:
    held: set[UUID]


IDS = [str(UUID(int=number)) for number in numbers_of_one_hash(10_000)]
INTS = numbers_of_one_hash(10_000)
KEYS = {str(number): 1 for number in INTS}
POINTS = [{"more": number, "x": number} for number in INTS]
NETS = [f"{IPv6Address(number)}/128" for number in INTS]
HELD: list[tuple[Any, Any]] = [
    *((made(set[int]), INTS) for made in (struct_of, model_of)),
    *((made(frozenset[int]), INTS) for made in (struct_of, model_of)),
    *((made(dict[int, int]), KEYS) for made in (struct_of, model_of)),
    *((made(set[Decimal]), list(map(str, INTS))) for made in (struct_of, model_of)),
    *((made(set[UUID]), IDS) for made in (struct_of, model_of)),
    *((made(dict[UUID, int]), dict.fromkeys(IDS, 1)) for made in (struct_of, model_of)),
    *((made(set[tuple[int, str]]), [[number, "x"] for number in INTS]) for made in (struct_of, model_of)),
    *((made(set[Point]), POINTS) for made in (struct_of, model_of)),
    (struct_of(set[FrozenStruct]), POINTS),
    (model_of(set[FrozenModel]), POINTS),
    (struct_of(set[int | str]), [*INTS, "x"]),
    (struct_of(Mapping[int, Any]), KEYS),
    (struct_of(list[set[int]] | None), [INTS]),
    (struct_of(set[frozenset[int]]), [[1], INTS]),
    (struct_of(Nesting), {"held": IDS}),
    (struct_of(set), INTS),
    (model_of(set[Any]), INTS),
    (model_of(Nesting), {"held": IDS}),
    (model_of(set[IPv6Address]), [str(IPv6Address(number)) for number in INTS]),
    (model_of(set[IPv6Network]), NETS),
    (model_of(pydantic.conset(int)), INTS),
    (model_of(pydantic.RootModel[set[int]]), INTS),
    (model_of(pydantic.Json[set[int]]), json.dumps(INTS)),
    (model_of(set[int]), [*map(str, INTS), "no number"]),
    (OfAny[int], INTS),
    (ModelOfAny[int], KEYS),
    (CheckedSet, INTS),
    (GenericAlias(list, (struct_of(set[int]),)), INTS),
    (GenericAlias(dict, (str, model_of(set[int]))), INTS),
]


@pytest.mark.parametrize(("kind", "value"), HELD, ids=range(len(HELD)))
def test_values_of_one_hash_in_types_of_libraries_hold_up_nobody(kind: Any, value: Any) -> None:
    body: Any = {"held": value}
    body = [body] if get_origin(kind) is list else {"one": body} if get_origin(kind) is dict else body
    with pytest.raises(DecodeError, match=f"more than {COLLISIONS_MAX} different values with one hash"):
        decode(json.dumps(body).encode(), kind)


def test_values_of_one_hash_before_an_error_or_under_a_key_that_comes_again_hold_up_nobody() -> None:
    colliding = json.dumps(INTS).encode()
    for body, says in [
        (b'{"held":%b,"held":[]}' % colliding, "with one hash"),
        (b'{"held":%b,"x"}' % colliding, "is no JSON"),
        (b'{"held":%b}' % colliding.replace(b"]", b",[]]"), "with one hash"),
    ]:
        with pytest.raises(DecodeError, match=says):
            decode(body, struct_of(set[int]))


def test_decimals_of_one_hash_that_are_numbers_hold_up_nobody() -> None:
    """A float has not all of their digits."""
    body = ",".join(f"{factor * SAME_HASH}.0" for factor in range(1, 10_000))
    with pytest.raises(DecodeError, match="with one hash"):
        decode(f'{{"held":[{body}]}}'.encode(), struct_of(set[Decimal]))


def test_frozen_dataclasses_of_one_hash_hold_up_nobody() -> None:
    with pytest.raises(DecodeError, match="with one hash"):
        decode(json.dumps(POINTS).encode(), set[Point])


@pytest.mark.parametrize("depth", [100, 300, 510])
@pytest.mark.parametrize("made", [struct_of, model_of])
def test_long_arrays_in_each_other_hold_up_nobody(made: Callable[[Any], Any], depth: int) -> None:
    inner = "0"
    for _ in range(depth):
        inner = f"[{'0,' * UNCHECKED}{inner}]"
    began = time.process_time()
    with pytest.raises(DecodeError, match=r"does not fit|too many long arrays and objects in each other"):
        decode(f'{{"held":{inner}}}'.encode(), made(set[int]))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("made", [struct_of, model_of])
def test_a_text_that_looks_like_deep_json_is_read(made: Callable[[Any], Any]) -> None:
    text = "[" * 3 * UNCHECKED
    assert decode(json.dumps({"held": [text]}).encode(), made(dict[str, int] | list[str])).held == [text]


@pytest.mark.parametrize("made", [struct_of, model_of])
def test_large_sets_of_libraries_are_read(made: Callable[[Any], Any]) -> None:
    many = list(range(20 * UNCHECKED))
    assert decode(json.dumps({"held": many}).encode(), made(set[int])).held == set(many)
    keys = {str(one): one for one in many}
    assert decode(json.dumps({"held": keys}).encode(), made(dict[int, int])).held == {one: one for one in many}
    few = numbers_of_one_hash(UNCHECKED)
    assert decode(json.dumps({"held": few}).encode(), made(set[int])).held == set(few)
    assert decode(json.dumps({"held": INTS}).encode(), made(list[int])).held == INTS


class Recursive(msgspec.Struct):
    held: set[int]
    inner: Recursive | None = None


class RecursiveModel(pydantic.BaseModel):
    held: set[int]
    inner: list[RecursiveModel] = []


@pytest.mark.parametrize("kind", [Recursive, RecursiveModel])
def test_types_that_hold_themselves_are_screened(kind: Any) -> None:
    inner: Any = {"held": INTS}
    with pytest.raises(DecodeError, match="with one hash"):
        decode(json.dumps({"held": [], "inner": inner if kind is Recursive else [inner]}).encode(), kind)


class Early(pydantic.BaseModel):
    held: set[Later]


class EarlyOuter(pydantic.BaseModel):
    held: LaterModel


@pydantic.dataclasses.dataclass
class EarlyChecked:
    held: set[Later]


@dataclass
class EarlyPlain:
    held: set[Later]


class EarlyStruct(msgspec.Struct):
    held: set[Later]


Later = UUID


class LaterModel(pydantic.RootModel[set[UUID]]):
    pass


def local_model() -> Any:
    """Return a model in which is a type that only pydantic can resolve."""

    class LocalId(pydantic.RootModel[UUID], frozen=True):
        pass

    @dataclass
    class Inner:
        held: set[LocalId]

    class Outer(pydantic.BaseModel):
        held: Inner

    return Outer


@pytest.mark.parametrize("kind", [Early, EarlyOuter, EarlyChecked, model_of(EarlyPlain), EarlyStruct, local_model()])
def test_types_that_were_defined_later_or_elsewhere_are_screened(kind: Any) -> None:
    held: Any = IDS if kind.__name__.startswith("Early") else {"held": IDS}
    with pytest.raises(DecodeError, match="with one hash"):
        decode(json.dumps({"held": held}).encode(), kind)


@pytest.mark.parametrize("kind", [Struct, Model, Numbers, Checked, struct_of(dict[str, int]), model_of(set[str])])
def test_types_without_what_a_sender_can_choose_the_hash_of_are_not_screened(kind: Any) -> None:
    assert "screened" not in screened_reader(str(library_of(kind)), kind).__qualname__


def test_a_large_set_and_a_small_one_with_equal_hashes_are_read() -> None:
    many = list(range(20 * UNCHECKED))
    assert decode(json.dumps(many).encode(), set[int]) == set(many)
    assert decode(json.dumps([7] * 20 * UNCHECKED).encode(), set[int]) == {7}
    few = numbers_of_one_hash(UNCHECKED)
    assert decode(json.dumps(few).encode(), set[int]) == set(few)
    assert decode(json.dumps({str(one): one for one in many}).encode(), dict[int, int]) == {one: one for one in many}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Numbers, b'{"numbers":[' + b'"x",' * 50_000 + b"1]}"),
        (list[int], b"[" + b'"x",' * 50_000 + b"1]"),
        (timedelta, b'"P' + b"9" * 200_000 + b'D"'),
        (Decimal, b"0.5" + b"0" * 200_000 + b"1"),
        (Decimal, b"1e1000000000"),
        (dict[Decimal, int], b'{"1e1000000000":1,"1e999999999":1}'),
        (set[Decimal], b"[1e1000000000,1e-1000000000]"),
        (list[Line], b'[{"number":1,"nested":' + b'{"number":1,"nested":' * 400 + b"7" + b"}" * 400 + b"}]"),
    ],
    ids=lambda one: ascii(one[:24]) if isinstance(one, bytes) else "",
)
def test_the_memory_for_a_body_is_bounded(kind: Any, body: bytes) -> None:
    tracemalloc.start()
    try:
        assert len(refusal(decode, body, kind)) <= ERROR_MAX
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("made", [struct_of, model_of])
def test_the_memory_for_long_objects_in_each_other_is_bounded(made: Callable[[Any], Any]) -> None:
    inner, others = "0", '"":0,' * UNCHECKED
    for _ in range(100):
        inner = f'{{{others}"":{inner}}}'
    body = f'{{"held":[{"0," * UNCHECKED}{inner}]}}'.encode()
    decode(b'{"held":[]}', made(set[int]))
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode(body, made(set[int]))
        assert tracemalloc.get_traced_memory()[1] < 80 * len(body)
    finally:
        tracemalloc.stop()


def test_a_decimal_of_any_size_is_read_at_once_and_not_expanded() -> None:
    began = time.thread_time()
    assert decode(b"1e1000000000", Decimal) == Decimal("1e1000000000")
    assert time.thread_time() - began < 1


# --- errors of the types' own code -------------------------------------------------------------------------------


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("has no text")


@dataclass
class Raising:
    how: str

    def __post_init__(self) -> None:
        raise Rude if self.how == "rude" else ZeroDivisionError(self.how)


class RaisingModel(pydantic.BaseModel):
    how: str

    @pydantic.field_validator("how")
    @classmethod
    def check(cls, how: str) -> str:
        raise Rude if how == "rude" else ZeroDivisionError(how)


class RaisingStruct(msgspec.Struct):
    how: str

    def __post_init__(self) -> None:
        raise Rude if self.how == "rude" else ZeroDivisionError(self.how)


@pytest.mark.parametrize("kind", [Raising, RaisingModel, RaisingStruct])
@pytest.mark.parametrize("how", ["rude", "x" * 100_000])
def test_what_a_types_own_code_raises_is_a_decode_error_with_a_short_text(kind: Any, how: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(json.dumps({"how": how}).encode(), kind)
    assert len(str(caught.value)) < 2 * SHOWN_WHY


def test_a_key_that_has_no_hash_is_refused() -> None:
    with pytest.raises(DecodeError, match="has the key 'AAAA', which can't be one"):
        decode(b'{"AAAA":1}', dict[bytearray, int])


def test_the_longest_durations_are_read() -> None:
    assert decode(b'"P999999999DT86399.999999S"', timedelta) == timedelta.max
    assert decode(b'"-P999999999DT0S"', timedelta) == timedelta.min
