"""JSON and typed bodies: a thin layer over bytes; :mod:`tenure._queue.typed` does the work.

No envelope and no type names on the wire: the body is the JSON that any client would send.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar, overload

from tenure._queue.typed import reader
from tenure._queue.typed_values import Misfit, written
from tenure._queue.typed_writing import plain, spelled_out, written_by_library
from tenure.errors import ConfigError, DecodeError

T = TypeVar("T")

JSON_TYPE = "application/json"


def encode(value: object) -> bytes:
    """Return *value* as JSON, for ``json=`` and for :func:`decode` to read.

    Raises:
        ConfigError: It holds something that has no JSON form.
    """
    try:
        if (body := written_by_library(value)) is not None:
            return body
        try:
            return _dumps(value)
        except TypeError:  # perhaps a key that is no text; if not, the next try names the place
            return _dumps(spelled_out(value))
    except RecursionError as error:  # its repr would be one more
        raise ConfigError(f"json, a {type(value).__name__}, is nested too deeply, or in itself") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{_named(value)} can't be written as JSON: {error}") from error


def _named(value: object) -> str:
    try:
        return f"json={value!r:.80}"
    except Exception:  # an int of too many digits, or raised by the type's own code
        return f"json, a {type(value).__name__},"


def _dumps(value: object) -> bytes:
    return json.dumps(value, default=plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def text_in(body: bytes) -> str:
    """Return the text in *body*.

    Raises:
        DecodeError: It is not UTF-8.
    """
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"the body is no text in UTF-8: {error}") from error


def loads(body: bytes) -> Any:
    """Return the JSON in *body*.

    Raises:
        DecodeError: It is none.
    """
    return _loads(body, _JSON)


def _loads(body: bytes, decoder: json.JSONDecoder) -> Any:
    try:
        return decoder.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the body is no JSON: {error}") from error


def _no_number(name: str) -> None:
    raise ValueError(f"it has no {name}")


_JSON = json.JSONDecoder(parse_constant=_no_number)
_EXACT_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=written)


@overload
def decode(body: bytes, kind: type[T]) -> T: ...
@overload
def decode(body: bytes, kind: object) -> Any: ...
def decode(body: bytes, kind: Any) -> Any:
    """Return the JSON in *body* as a *kind*: a dataclass, a pydantic model, a msgspec struct, ``list[UUID]``, ….

    Raises:
        DecodeError: The body is no JSON, or doesn't fit.
        ConfigError: Bodies can't be read as a *kind*, whatever is in them.
    """
    how = reader(kind)
    value = body if how.takes_bytes else _loads(body, _EXACT_JSON if how.exact else _JSON)
    try:
        return how.read(value)
    except Misfit as misfit:
        raise DecodeError(str(misfit)) from misfit.__cause__
    except RecursionError as error:
        raise DecodeError(f"the body is nested too deeply for {kind!r:.80}") from error
